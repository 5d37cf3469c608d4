"""`mlx-rewind serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draft.protocol import kind_of
from ..load import SHIPPED, load
from ..sampling import SamplingParams
from .drafting import add_draft_options, draft_kind, drafter_for
from .options import common_options, number

if TYPE_CHECKING:
    from ..server.desk import Served
    from ..server.settings import Settings

#: Sampling options that an operator may set as defaults.
_DEFAULTS = {"temp": float, "top_p": float, "top_k": int, "min_p": float}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        parents=[common_options()],
        help="an OpenAI-compatible server, with a chat page (extra `server`)",
    )
    parser.set_defaults(command=_serve)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=number("port", int, 0, 65535), default=8080, help="0: a free one (8080)")
    add("--served-name", action="append", help="name of the model in requests; may be repeated")
    add("--adapter-path", help="trained adapter weights")
    add("--chat-template", help="a Jinja template instead of the tokenizer's")
    add("--chat-template-args", type=_object, default={}, help="JSON object of template options")
    for name, kind in _DEFAULTS.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="for requests that do not set it")
    _add_limits(parser)
    add_draft_options(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    def count(name: str, low: int = 1) -> Any:
        return number(name, int, low)

    add = parser.add_argument_group("limits").add_argument
    add("--max-tokens", type=count("max_tokens"), default=512, help="of an answer (512)")
    add("--max-tokens-limit", type=count("limit"), default=32_768, help="most that may be asked")
    add("--max-prompt-tokens", type=count("max_prompt_tokens"), default=131_072, help="(131072)")
    add("--max-total-tokens", type=count("max_total_tokens"), help="of all requests at work")
    add("--max-rows", type=count("max_rows"), default=8, help="choices in one batch (8)")
    add("--queue-limit", type=count("queue_limit", 0), default=64, help="that may wait (64)")
    add("--memory-limit", type=count("memory_limit"), help="bytes of all caches")
    add("--max-body-bytes", type=count("max_body_bytes"), default=4 << 20, help="(4 MiB)")
    add("--prefill-step-size", type=count("step"), default=512, help="prompt tokens per step (512)")
    add("--kv-bits", type=int, help="quantise KV caches to this many bits")
    add("--kv-group-size", type=int, default=64, help="group size of kv-bits (64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before kv-bits takes effect")
    add("--drain-seconds", type=number("drain_seconds", float, 0), default=30.0, help="(30)")
    add = parser.add_argument_group("access").add_argument
    add("--api-key", action="append", default=[], help="may be repeated; @FILE reads one per line")
    add("--allowed-origins", default="", help="web origins whose pages may call, with commas")
    add("--allowed-hosts", default="", help="more names for the Host header, with commas")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value


def _serve(args: argparse.Namespace) -> None:
    try:
        from ..server.run import Server, is_loopback, listen
        from ..server.worker import Worker
    except ImportError as error:
        raise ImportError(f"serve needs `pip install 'mlx-rewind[server]'` ({error})") from None
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    kind = draft_kind(args)
    if args.prediction_file is not None or kind == "prediction":
        raise ValueError("serve takes predictions from requests: leave out --prediction-file")
    if args.num_draft_tokens is None:
        args.num_draft_tokens = 8 if kind == "auto" else 4
    settings = settings_of(args)
    if not is_loopback(args.host) and not settings.api_keys:
        print(
            "mlx-rewind: note: anyone who reaches this port may use it; see --api-key",
            file=sys.stderr,
        )
    bound = listen(args.host, args.port)
    with bound:
        worker = Worker(lambda: served(args, kind), settings)
        worker.start()
        port = bound.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        line = {"url": f"http://{host}:{port}", "model": settings.models[0]}
        line["draft_kind"] = worker.drafters[0]
        shown = f"{line['url']}  model {line['model']}, drafter {line['draft_kind']}"
        print(json.dumps(line) if args.json else shown, flush=True)
        Server(worker, settings, args.drain_seconds).run(sockets=[bound])


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ValueError for a default that is out of bounds."""
    from ..server.run import is_loopback
    from ..server.settings import Settings

    given = {name: getattr(args, name) for name in _DEFAULTS}
    defaults = {name: value for name, value in given.items() if value is not None}
    if "temp" in defaults:
        defaults["temperature"] = defaults.pop("temp")
    SamplingParams(**defaults)
    hosts: tuple[str, ...] = ()
    if is_loopback(args.host):
        hosts = ("localhost", "127.0.0.1", "::1", args.host, *_list(args.allowed_hosts.lower()))
    elif args.allowed_hosts:
        hosts = (args.host, *_list(args.allowed_hosts.lower()))
    return Settings(
        models=_names(args),
        draft_models=() if args.draft_model is None else _shown(args.draft_model),
        num_draft_tokens=args.num_draft_tokens,
        max_draft_tokens=max(16, args.num_draft_tokens),
        defaults=defaults,
        max_tokens=min(args.max_tokens, args.max_tokens_limit),
        max_tokens_limit=args.max_tokens_limit,
        max_prompt_tokens=args.max_prompt_tokens,
        max_total_tokens=args.max_total_tokens,
        max_rows=args.max_rows,
        queue_limit=args.queue_limit,
        max_body_bytes=args.max_body_bytes,
        api_keys=_keys(args.api_key),
        origins=_list(args.allowed_origins),
        hosts=hosts,
    )


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    if args.served_name:
        return tuple(args.served_name)
    return (SHIPPED.name,) if args.model is None else _shown(args.model)


def _shown(name: str) -> tuple[str, ...]:
    """The hub name, or a folder's own name: where it lies is nobody's business."""
    path = Path(name)
    return (path.resolve().name,) if path.exists() else (name,)


def _keys(given: list[str]) -> tuple[str, ...]:
    keys: list[str] = []
    for key in given:
        if key.startswith("@"):
            if not Path(key[1:]).is_file():
                raise FileNotFoundError(f"--api-key: no file at {key[1:]}")
            keys += Path(key[1:]).read_text(encoding="utf-8").split()
        else:
            keys.append(key)
    if given and not all(keys or [""]):
        raise ValueError("--api-key: a key is empty")
    return tuple(keys)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def served(args: argparse.Namespace, kind: str) -> Served:
    """Loads what is served. Raises as `load` and the drafters do."""
    from ..server.desk import Served

    config: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.chat_template is not None:
        config["chat_template"] = args.chat_template
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config=config,
    )
    drafter = drafter_for(kind, args, model, tokenizer)
    quantization = {}
    if args.kv_bits is not None:
        names = ("kv_bits", "kv_group_size", "quantized_kv_start")
        quantization = {name: getattr(args, name) for name in names}
    assert kind_of(drafter) == kind
    return Served(
        model,
        tokenizer,
        drafter,
        template=args.chat_template_args,
        engine={
            "max_rows": args.max_rows,
            "memory_limit": args.memory_limit,
            "prefill_step_size": args.prefill_step_size,
            "max_draft_tokens": max(16, args.num_draft_tokens),
        },
        request=quantization,
    )
