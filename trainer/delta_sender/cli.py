"""The command ``delta-send``: send the difference of two checkpoints to engines or files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_sender.locations import engine_root, log_location, log_of
from delta_sender.options import DEFAULTS, FLAGS
from engine_ext.commands import CommandParser, leaving_at_once, positive_seconds, without_traceback
from engine_ext.settings import API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT

PROG = "delta-send"

_DESCRIPTION = """\
Send the difference between two Hugging Face checkpoints (safetensors) to engines that hold the
first one, as a sparse weight update. Each engine applies it bit-exactly on every rank, or refuses
it and stays as it was."""

_EPILOG = f"""\
examples:
  delta-send --base CHECKPOINT --target NEXT --url http://engine:8000
  delta-send --base CHECKPOINT --target NEXT --dry-run --encoding auto
  delta-send --target NEXT --full --url http://engine:8000
  delta-send --base CHECKPOINT --target NEXT --log s3://BUCKET/RUN --notify http://engine:8000
  delta-send --base FP8_CHECKPOINT --target NEXT --quantize fp8_block --url http://engine:8000

environment:
  {API_KEY_ENVIRONMENT}    bearer token, if --api-key is not given
  {HMAC_KEY_ENVIRONMENT}   key that the parts are signed with

exit status:
  0    done
  1    an engine refused, could not be reached or was too late; the others have committed. An engine
       of another run refuses: close that sender, or --takeover. One with other weights than --base
       is left as it is: give the base that it holds, or --allow-full or --full
  2    bad usage, or checkpoints that are unreadable or do not match
  130  interrupted (143: terminated); what was staged in engines is dropped"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; options come from `SenderOptions`."""
    parser = CommandParser(PROG, description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("--base", type=Path, metavar="DIR", help="checkpoint that the engines hold now")
    add("--target", type=Path, metavar="DIR", required=True, help="checkpoint to send")
    url_help = (
        "root of an engine's server, http://host:port; repeatable, for several engines; or a delta "
        "log that engines follow (s3://BUCKET/PREFIX, file:///PATH), as --log"
    )
    add("--url", action="append", help=url_help)
    full_help = (
        "send all of --target, dense, whatever the engine holds; needs --base only with --quantize"
    )
    add("--full", action="store_true", dest="sends_all", help=full_help)
    log_help = (
        "write the parts to LOG/weight_v<version>/, as a delta log or for the disk endpoint, and "
        "post nothing; a folder, or a URL in an object store. With --url, the engine is only asked "
        "which tensors it ignores and what its digest covers"
    )
    add("--log", "--save", dest="log", metavar="LOG", help=log_help)
    notify_help = (
        "root of an engine that follows the log of --log, or of --url: it is asked to look there "
        "at once, and what --log says of an engine's --url; repeatable"
    )
    add("--notify", action="append", metavar="URL", help=notify_help)
    add("--dry-run", action="store_true", help="print what would be sent; post and write nothing")
    wait_help = (
        "wait until each --url answers, as an engine that starts does not yet; for SECONDS at "
        "most, 600 if none are given"
    )
    wait: dict[str, Any] = {
        "nargs": "?",
        "const": 600.0,
        "type": positive_seconds,
        "metavar": "SECONDS",
    }
    add("--wait", **wait, help=wait_help)
    group = parser.add_argument_group("sync options")
    for name, default in DEFAULTS.items():
        if name in FLAGS:
            _add_flag(group, name, default, FLAGS[name])
        elif name == "full":
            allow_help = "send all of --target if the engine holds something else than --base"
            flag: dict[str, Any] = {"action": "store_const", "const": "allow"}
            group.add_argument("--allow-full", dest=name, default=default, help=allow_help, **flag)
    return parser


def _add_flag(group: Any, name: str, default: Any, keywords: Mapping[str, Any]) -> None:
    flag = name.replace("_", "-")
    if default is True:
        group.add_argument(f"--no-{flag}", dest=name, action="store_false", **keywords)
        return
    help_text = keywords["help"] + ("" if default is None else " (default: %(default)s)")
    shown: dict[str, Any] = {**keywords, "help": help_text}
    group.add_argument(f"--{flag}", default=default, **shown)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; a wrong one ends the process with status 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.sends_all and options.quantize is None:
        options.base = options.target
    elif options.base is None:
        parser.error("--base is needed, except with --full and without --quantize")
    _take_log(parser, options)
    if options.url is None and options.log is None and not options.dry_run:
        parser.error("--url or --log is needed, except with --dry-run")
    if options.log is not None and (options.delta_log or options.state) is not None:
        parser.error("--log cannot be combined with --delta-log or --state: it posts nothing")
    if options.wait is not None and options.url is None:
        parser.error("--wait is for engines: give --url")
    if options.log is not None and options.url is not None and len(options.url) > 1:
        parser.error("--log writes for one engine: give one --url at most")
    try:
        for url in (*(options.url or ()), *(options.notify or ())):
            engine_root(url)
    except ValueError as error:
        parser.error(str(error))
    return options


def _take_log(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Take a log that is given as --url as --log."""
    try:
        if options.log is not None:
            options.log = log_of(options.log)
        logs = [log for url in options.url or () if (log := log_location(url)) is not None]
    except ValueError as error:
        parser.error(str(error))
    if logs and (len(options.url) > 1 or options.log is not None):
        parser.error("a delta log is the only --url, and not with --log; engines go to --notify")
    if logs:
        [options.log], options.url = logs, None
    if options.notify is not None and options.log is None:
        parser.error("--notify is for engines that follow a log: give --log, or a log's --url")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return without_traceback(PROG, lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    with leaving_at_once(PROG):
        options = parse_arguments(arguments)
        from delta_sender import send_command
    return send_command.run(options)
