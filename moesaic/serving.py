"""What `moesaic serve` does: start ranks and front, print what to type next, and end when they end."""

from __future__ import annotations

import hashlib
import shutil
import ssl
import sys
from pathlib import Path
from typing import Any

from configs.engine import Plan
from configs.env import interface_variables, read_env
from configs.json_option import json_object
from configs.server import ServerConfig
from engine.plan import make_plan
from engine.process.console import guard_console, say_text
from engine.process.orphan import die_with_parent
from front.model_defaults import overrides_of
from launch.doctor.machine import Machine
from launch.doctor.run import Doctor, refusal
from launch.early import drop_early
from launch.head import HeadSupervisor
from launch.launchers.place import Place
from launch.remote import RemoteSupervisor
from launch.supervisor import Supervisor
from moesaic.host_options import take_hosts
from moesaic.options import EMBEDDED_RANKS, engine_config


def serve(options: dict[str, Any]) -> int:
    """The exit code. options: as the command has read them; ValueError."""
    guard_console()
    parent = options.pop("parent")
    if parent is not None:
        die_with_parent(parent)
    env = read_env()
    startup_timeout = options.pop("startup_timeout")
    server = server_config(options, env.api_keys, env.admin_keys)
    given = options["model"] or options["model_option"]
    hosts, place = take_hosts(options, 1 if given else EMBEDDED_RANKS, startup_timeout)
    config = engine_config(options)
    plan = make_plan(config, hosts=hosts)
    _refuse_early(plan, place)
    say_text(
        f"{plan.served_model_names[0]} ({plan.architecture}), {plan.data_parallel_size} rank(s), {plan.dtype}, "
        f"experts over {plan.all2all_backend}"
    )
    name = plan.served_model_names[0]
    if plan.device != "cpu":
        drop_early()
    if hosts is not None and hosts.headless:
        return RemoteSupervisor(plan, hosts, env.runtime_root, startup_timeout).run()

    def on_ready(url: str) -> None:
        _say_next(url, name, server)

    if hosts is not None:
        return HeadSupervisor(plan, server, hosts, env.runtime_root, startup_timeout, on_ready).run()
    return Supervisor(plan, server, env.runtime_root, startup_timeout, on_ready).run()


def _refuse_early(plan: Plan, place: Place) -> None:
    """By the quick part of `moesaic doctor`: what would fail later, and say less."""
    machine = Machine(place.index, plan, variables=interface_variables())
    reason = refusal(Doctor(machine=machine, model=Path(plan.model_path)))
    if reason:
        raise ValueError(f"{reason}; moesaic doctor says more")


def server_config(options: dict[str, Any], env_keys: tuple[str, ...], env_admin: tuple[str, ...]) -> ServerConfig:
    """Removes the options that it is made of."""
    template = options.pop("chat_template")
    record_dir, profile_dir = options.pop("eplb_record_dir"), options.pop("profile_dir")
    kwargs, generation = options.pop("default_chat_template_kwargs"), options.pop("override_generation_config")
    certificate = options.pop("ssl_certfile"), options.pop("ssl_keyfile")
    _check_certificate(*certificate)
    return ServerConfig(
        host=options.pop("host"),
        port=options.pop("port"),
        uds=None if (uds := options.pop("uds")) is None else str(Path(uds).absolute()),
        api_key_digests=_digests((*options.pop("api_key"), *env_keys)),
        admin_key_digests=_digests((*options.pop("admin_api_key"), *env_admin)),
        chat_template=Path(template).read_text() if template else None,
        content_parts=options.pop("chat_template_content_format") == "openai",
        chat_template_kwargs=json_object("default_chat_template_kwargs", kwargs)[0] if kwargs else {},
        generation=overrides_of(*json_object("override_generation_config", generation)) if generation else {},
        root_path=_root_path(options.pop("root_path")),
        ssl_certfile=None if certificate[0] is None else str(Path(certificate[0]).resolve()),
        ssl_keyfile=None if certificate[1] is None else str(Path(certificate[1]).resolve()),
        tool_call_parser=_family(options.pop("tool_call_parser")),
        reasoning_parser=_family(options.pop("reasoning_parser")),
        structured_outputs_backend=_backend(options.pop("structured_outputs_config")),
        enable_auto_tool_choice=options.pop("enable_auto_tool_choice"),
        exclude_tools_when_tool_choice_none=options.pop("exclude_tools_when_tool_choice_none"),
        enable_force_include_usage=options.pop("enable_force_include_usage"),
        enable_prompt_tokens_details=options.pop("enable_prompt_tokens_details"),
        return_tokens_as_token_ids=options.pop("return_tokens_as_token_ids"),
        use_generation_config=options.pop("generation_config") == "auto",
        max_body_bytes=options.pop("max_request_bytes"),
        max_inflight_bytes=options.pop("max_inflight_bytes"),
        max_queued_requests=options.pop("max_num_queued_reqs"),
        max_stored_responses=options.pop("max_stored_responses"),
        max_stored_bytes=options.pop("max_stored_bytes"),
        shutdown_timeout=options.pop("shutdown_timeout"),
        keep_alive_interval=options.pop("sse_keep_alive_interval"),
        request_timeout=options.pop("request_timeout"),
        allowed_origins=options.pop("allowed_origins"),
        eplb_record_dir=str(Path(record_dir).resolve()) if record_dir else None,
        profile_dir=str(Path(profile_dir).resolve()) if profile_dir else None,
        otlp_traces_endpoint=options.pop("otlp_traces_endpoint"),
        log_format=options.pop("log_format"),
        log_requests=options.pop("log_requests"),
    )


def _check_certificate(certfile: str | None, keyfile: str | None) -> None:
    if (certfile is None) != (keyfile is None):
        raise ValueError("--ssl-certfile and --ssl-keyfile belong together: one is missing")
    if certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ValueError(f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile}: {error}") from None


def _backend(config: str | None) -> str:
    if config is None:
        return "auto"
    fields, where = json_object("structured_outputs_config", config)
    backend = fields.pop("backend", "auto")
    if fields:
        raise ValueError(f"{where}: {next(iter(fields))!r:.100} is not supported; backend is")
    if not isinstance(backend, str):
        raise ValueError(f"{where}: backend must be a text, not {backend!r:.100}")
    return backend


def _root_path(path: str) -> str:
    path = path.rstrip("/")
    if path and not path.startswith("/"):
        raise ValueError(f"--root-path must begin with a slash, not {path!r}")
    return path


def _family(name: str | None) -> str | None:
    return "" if name == "none" else name


def _digests(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not all(keys):
        raise ValueError("--api-key and --admin-api-key must not be empty")
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)


def _program() -> str:
    """What one types to run this command line again."""
    found = shutil.which("moesaic")
    if found is not None and Path(found).resolve() == Path(sys.executable).with_name("moesaic").resolve():
        return "moesaic"
    beside = Path(sys.executable).with_name("moesaic")
    return str(beside) if beside.exists() else f"{sys.executable} -m moesaic"


def _say_next(url: str, model: str, server: ServerConfig) -> None:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if server.api_key_digests else ""
    at = url if server.uds is None else f"--unix-socket {server.uds} http://localhost"
    content = "Tell me a story about a dog."
    message = '{"model": "%s", "messages": [{"role": "user", "content": "%s"}]}' % (model, content)  # noqa: UP031
    print(
        f"\nmoesaic: ready on {url}. In another terminal:\n"
        f"  curl {at}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{message}'\n"
        f"  {_program()} chat --url {url}\n",
        flush=True,
    )
