"""`mlx-rewind serve`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from ..draft.protocol import kind_of
from ..load import SHIPPED, load
from .drafting import add_draft_options, draft_kind, drafter_for
from .options import common_options, number


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        parents=[common_options()],
        help="an OpenAI-compatible server in which every request speculates",
    )
    parser.set_defaults(command=_serve)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=number("port", int, 0, 65535), default=8080, help="0: any free (8080)")
    add("--api-key", help="clients must send it; needed for other addresses than loopback")
    add("--cors", action="append", default=[], help="an origin that browsers may use; repeatable")
    add("--allow-host", action="append", default=[], help="a Host header to take; repeatable")
    add("--model-name", help="the name of the model for clients (that of --model)")
    add("--adapter-path", help="trained adapter weights")
    whole = number("a limit", int, 1)
    add("--max-rows", type=whole, default=8, help="requests under work at once (8)")
    add("--max-queue", type=number("max_queue", int, 0), default=64, help="that may wait (64)")
    add("--max-tokens", type=whole, default=4096, help="most tokens of an answer (4096)")
    add("--max-prompt", type=whole, default=131072, help="most tokens of a prompt (131072)")
    none_or = number("max_total_tokens", int, 0)
    add("--max-total-tokens", type=none_or, default=0, help="of all requests together (0: any)")
    add("--max-body", type=whole, default=4 << 20, help="most bytes of a request (4 MiB)")
    add("--max-schema", type=whole, default=64 << 10, help="most bytes of a JSON schema (64 KiB)")
    add("--prefill-step-size", type=whole, default=512, help="prompt tokens per step (512)")
    bytes_of = number("store_bytes", int, 0)
    add("--store-bytes", type=bytes_of, default=1 << 30, help="bytes of the store; 0: none (1 GiB)")
    add("--store", help="folder that the store starts from, and is saved to at the end")
    add_draft_options(parser)


def _serve(args: argparse.Namespace) -> None:
    try:
        from ..server.app import Settings, make_app
        from ..server.jobs import Limits
        from ..server.run import run
        from ..server.worker import Worker
    except ImportError as missing:
        raise ImportError(f"serve needs the extra `server`: {missing}") from missing
    if args.api_key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(f"--host {args.host} can be reached by others: give an --api-key too")
    kind = draft_kind(args)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
    )
    drafter = drafter_for(kind, args, model, tokenizer)
    names = [limit.name for limit in fields(Limits)]
    worker = Worker(
        model,
        tokenizer,
        drafter=drafter,
        num_draft_tokens=args.num_draft_tokens,
        limits=Limits(**{name: getattr(args, name) for name in names}),
        prefill_step_size=args.prefill_step_size,
        store_bytes=args.store_bytes,
        store_folder=args.store,
    )
    name = args.model_name or (args.model and str(args.model).rstrip("/").rsplit("/", 1)[-1])
    settings = Settings(
        name or SHIPPED.name,
        draft=args.draft_model and str(args.draft_model).rstrip("/").rsplit("/", 1)[-1],
        draft_kind=kind_of(drafter),
        api_key=args.api_key,
        cors=args.cors,
        hosts=_hosts(args),
    )
    print(f"mlx-rewind serve: {settings.model}, drafter {settings.draft_kind}", file=sys.stderr)
    run(make_app(worker, settings), worker, args.host, args.port)


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    """The Host headers to take: on loopback its names and those allowed, elsewhere any or those."""
    allowed = tuple(name.lower() for name in args.allow_host)
    if args.host in ("127.0.0.1", "::1", "localhost"):
        return ("127.0.0.1", "::1", "localhost", *allowed)
    return (args.host, *allowed) if allowed else ()
