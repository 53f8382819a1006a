"""A command that takes vLLM's spellings of options and of their values, and files of options.

--max_model_len for --max-model-len; `--served-model-name a b` and JSON lists for options that may be repeated;
`--eplb-config.window_size 100` for a field of an option whose value is a JSON object; `--config FILE.yaml`, whose
entries are options that the command line overrides.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from configs.dbo import DBO_MODES
from moesaic.options import GROUPS
from moesaic.vllm_flags import TAKEN, refusal

CONFIG = "--config"
MODES = {"--enable-dbo": DBO_MODES}  # whose value may be left out, so that a word behind them may be MODEL
LISTS = {"cudagraph_capture_sizes"}  # one value, with commas between its parts
TAKEN_NAMES = {flag.names[0] for flag in TAKEN}


class VllmCommand(click.Command):
    """Its help shows the options of the engine in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(_spelled(self, _with_file(args))))
        except click.NoSuchOption as error:
            reason = refusal(error.option_name.partition(".")[0])
            if reason:
                raise click.UsageError(reason, ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = {name: title for title, names in GROUPS.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        taken = []
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue  # the usage has it
            record = parameter.get_help_record(ctx)
            if TAKEN_NAMES & set(parameter.opts):
                taken.append(parameter.opts[0])
            elif record is not None:
                sections[groups.get(parameter.name or "", "Options")].append(record)
        sections["Options"].append((f"{CONFIG} FILE", "Options as YAML; what the command line says wins."))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if taken:
            with formatter.section("vLLM's, taken where what they ask for is so anyway"):
                margin = " " * formatter.current_indent
                width = formatter.width - len(margin)
                lines = textwrap.wrap(", ".join(taken), width, break_on_hyphens=False)
                formatter.write("".join(f"{margin}{line}\n" for line in lines))


def _with_file(args: list[str]) -> list[str]:
    """The arguments with those of --config FILE before them."""
    for place, word in enumerate(args):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name == CONFIG:
            rest = args[:place] + args[place + (1 if equals else 2) :]
            if not equals and place + 1 == len(args):
                raise click.UsageError(f"{CONFIG} needs a file")
            return [*_from_file(Path(value if equals else args[place + 1])), *rest]
    return args


def _from_file(path: Path) -> list[str]:
    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{CONFIG} {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    except RecursionError:
        raise click.UsageError(f"{CONFIG} {path}: too deep") from None
    except yaml.YAMLError as error:
        raise click.UsageError(f"{CONFIG} {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise click.UsageError(f"{CONFIG} {path}: must hold options, as `max-model-len: 8192`")
    words: list[str] = []
    for name, value in entries.items():
        option = "--" + name.lstrip("-").replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list | dict):
            try:
                words += [f"{option}={json.dumps(value)}"]
            except (TypeError, ValueError, RecursionError) as error:
                raise click.UsageError(f"{CONFIG} {path}: {name}: {error}") from None
        elif value is not None:
            words += [f"{option}={value}"]
    return words


def _spelled(command: click.Command, args: list[str]) -> Iterator[str]:
    """The arguments as click takes them."""
    options = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
    objects: dict[str, dict[str, Any]] = {}  # of options whose fields are given one by one
    words = _switched(options, args)
    while words:
        word = words.pop(0)
        if word == "--":
            yield from [word, *words]
            break
        if not word.startswith("-") or word == "-":
            yield word
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-") if "." not in name else _dotted(name)
        owner, dot, field = name.partition(".")
        take: Callable[[], str] = lambda: value if equals else _next(words, name)  # noqa: B023, E731
        if dot and owner in options:
            _put(objects.setdefault(owner, {}), field.split("."), _parsed(take()))
        elif name in objects or any(other.startswith(f"{name}.") for other in map(_dotted, words)):
            objects[name] = {**_object(name, take()), **objects.get(name, {})}
        elif name in options and (options[name].multiple or options[name].name in LISTS):
            yield from _list(options[name], name, [value] if equals else _words(words))
        elif name.startswith("--no-") and name not in options and f"--{name[5:]}" in options:
            # of a switch without such a name, which is off now (_switched); others are click's to refuse
            if not options[f"--{name[5:]}"].is_flag or name in options[f"--{name[5:]}"].secondary_opts:
                yield name
        elif equals and name in MODES and value not in MODES[name]:
            raise click.UsageError(f"Invalid value for {name!r}: {value!r} is none of {', '.join(MODES[name])}.")
        else:
            yield f"{name}={value}" if equals else name
    for name, fields in objects.items():
        yield from (name, json.dumps(fields))


def _switched(options: dict[str, click.Option], args: list[str]) -> list[str]:
    """Without the switches that a --no-NAME behind them, for which click has no name, takes back."""
    words: list[str] = []
    for place, word in enumerate(args):
        if word == "--":
            return words + args[place:]
        name = word.replace("_", "-")
        switch = options.get(f"--{name[5:]}") if name.startswith("--no-") and name not in options else None
        if switch is not None and switch.is_flag:
            words = [one for one in words if one.replace("_", "-") not in switch.opts]
        words.append(word)
    return words


def _dotted(name: str) -> str:
    """The option's own name with dashes, its fields with underscores."""
    owner, dot, field = name.partition(".")
    return owner.replace("_", "-") + dot + field.replace("-", "_")


def _next(words: list[str], name: str) -> str:
    if not words:
        raise click.UsageError(f"Option {name!r} requires an argument.")
    return words.pop(0)


def _words(words: list[str]) -> list[str]:
    """The values that follow an option; a directory behind one of them is MODEL."""
    found: list[str] = []
    while words and not words[0].startswith("-"):
        if found and len(words) >= 1 and Path(words[0]).is_dir():
            break
        found.append(words.pop(0))
    return found


def _list(option: click.Option, name: str, values: list[str]) -> Iterator[str]:
    parts: list[str] = []
    for value in values:
        if value.startswith("["):
            found = _parsed(value)
            if not isinstance(found, list):
                raise click.UsageError(f"{name}: {value!r} is not a JSON list")
            parts += map(str, found)
        else:
            parts.append(value)
    if option.multiple:
        for part in parts:
            yield from (name, part)
        if not values:
            yield name  # for click to say that a value is missing
    else:
        yield from (name, ",".join(parts))


def _object(name: str, text: str) -> dict[str, Any]:
    found = _parsed(text)
    if not isinstance(found, dict):
        raise click.UsageError(f"{name}: {text!r} is not a JSON object, and its fields are given besides")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise click.UsageError(f"field {part!r} is given both as a value and as an object")
    target[path[-1]] = value
