"""vLLM or llama.cpp behind the pipes of benchmarks/engines.py, each in its own virtual environment:

    VLLM_PYTHON benchmarks/peer_engines.py vllm --model DIR      LLAMA_PYTHON benchmarks/peer_engines.py llama --model FILE.gguf

Nothing of ours is imported. Both are driven in process by the strongest form that was found (facts in docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], int]
LLAMA_BATCH = 2048
REPACKED = ("Q4_0", "Q4_K")  # llama.cpp has a layout of them for x86's vector instructions


def prompts(case: dict[str, Any], vocabulary: int) -> list[list[int]]:
    """As benchmarks/engines.py makes them."""
    rng = random.Random(f"{case['seed']}/{case['prompts']}/{case['input']}")
    return [[rng.randrange(100, vocabulary) for _ in range(case["input"])] for _ in range(case["prompts"])]


def vllm(arguments: argparse.Namespace) -> tuple[Generate, int]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{arguments.threads - 1}")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=256, seed=0, skip_tokenizer_init=True
    )

    def generate(ids: list[list[int]], output: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return generate, llm.llm_engine.model_config.get_vocab_size()


def llama(arguments: argparse.Namespace) -> tuple[Generate, int]:
    """The least that a server would do: one batch per step, greedy on the logits."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_mmap = False
    overrides = _for_vectors(arguments.model) if arguments.no_tiles else None
    parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p) if overrides else None
    parameters.use_extra_bufts = overrides is None
    model = llama_cpp.llama_model_load_from_file(arguments.model.encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {arguments.model}")
    runs = LlamaRuns(llama_cpp, model, arguments.threads, silent)
    return runs.generate, int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def _for_vectors(path: str) -> ctypes.Array[_Override]:
    """llama.cpp's layout for vector instructions for every matrix that has one. By itself it takes the one for AMX
    where the CPU has that."""
    import gguf
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    base, whole = ctypes.CDLL(str(folder / "libggml-base.so")), ctypes.CDLL(str(folder / "libggml.so"))
    for function in (whole.ggml_backend_dev_by_type, base.ggml_backend_dev_backend_reg):
        function.restype = ctypes.c_void_p
    base.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    base.ggml_backend_buft_name.restype = ctypes.c_char_p
    device = ctypes.c_void_p(whole.ggml_backend_dev_by_type(0))
    registry = ctypes.c_void_p(base.ggml_backend_dev_backend_reg(device))
    address = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    found = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    number = next(i for i in range(8) if base.ggml_backend_buft_name(ctypes.c_void_p(found[i])) == b"CPU_REPACK")
    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.tensor_type.name in REPACKED]
    names = [tensor.name for tensor in tensors if tensor.name != "token_embd.weight"]  # its rows are looked up
    rows = [_Override(name.replace(".", "[.]").encode(), found[number]) for name in names]
    return (_Override * (len(rows) + 1))(*rows)  # the last one is empty


class LlamaRuns:
    """One context per shape of case, kept for the next repetition."""

    def __init__(self, library: Any, model: Any, threads: int, keep: Any) -> None:
        self._library = library
        self._model = model
        self._threads = threads
        self._keep = keep  # the library calls it
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self._context: Any = None
        self._shape = (0, 0)

    def generate(self, ids: list[list[int]], output: int) -> int:
        library = self._library
        context = self._context_for(len(ids), max(map(len, ids)) + output)
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch = library.llama_batch_init(LLAMA_BATCH, 0, 1)
        current = self._prefill(context, batch, ids)
        for step in range(1, output):
            for sequence, token in enumerate(current):
                self._put(batch, sequence, token, len(ids[sequence]) + step - 1, sequence, True)
            batch.n_tokens = len(ids)
            current = self._decode(context, batch, list(range(len(ids))))
        library.llama_batch_free(batch)
        return len(ids) * output

    def _prefill(self, context: Any, batch: Any, ids: list[list[int]]) -> list[int]:
        """Whole prompts, as many at a time as a batch holds; the first token of each sequence."""
        first: list[int] = []
        while len(first) < len(ids):
            count, rows = 0, []
            for sequence in range(len(first), len(ids)):
                if count + len(ids[sequence]) > LLAMA_BATCH:
                    break
                for position, token in enumerate(ids[sequence]):
                    self._put(batch, count, token, position, sequence, position == len(ids[sequence]) - 1)
                    count += 1
                rows.append(count - 1)
            batch.n_tokens = count
            first += self._decode(context, batch, rows)
        return first

    def _put(self, batch: Any, row: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, int(wanted)
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence

    def _decode(self, context: Any, batch: Any, rows: list[int]) -> list[int]:
        import numpy as np

        if self._library.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        shape = (self._vocabulary,)
        return [
            int(np.ctypeslib.as_array(self._library.llama_get_logits_ith(context, row), shape).argmax()) for row in rows
        ]

    def _context_for(self, sequences: int, length: int) -> Any:
        if self._shape != (sequences, length):
            if self._context is not None:
                self._library.llama_free(self._context)
            parameters = self._library.llama_context_default_params()
            parameters.n_ctx = sequences * (-(-length // 256) * 256)
            parameters.n_batch = LLAMA_BATCH
            parameters.n_ubatch = 512
            parameters.n_seq_max = sequences
            parameters.n_threads = parameters.n_threads_batch = self._threads
            parameters.kv_unified = False
            self._context = self._library.llama_init_from_model(self._model, parameters)
            self._shape = (sequences, length)
            if not self._context:
                raise RuntimeError("llama.cpp cannot make a context")
        return self._context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["vllm", "llama"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-tiles", action="store_true", help="llama.cpp: no layouts for AMX")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print, in C too, must not get between the answers
    began = time.perf_counter()
    generate, vocabulary = (vllm if arguments.kind == "vllm" else llama)(arguments)
    print(json.dumps({"startup_s": round(time.perf_counter() - began, 3)}), file=out, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        ids = prompts(case, min(vocabulary, 32000))
        began = time.perf_counter()
        produced = generate(ids, case["output"])
        seconds = time.perf_counter() - began
        assert produced == case["prompts"] * case["output"], produced
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak_rss_mb": round(peak), "steps": 0}), file=out, flush=True)


if __name__ == "__main__":
    main()
