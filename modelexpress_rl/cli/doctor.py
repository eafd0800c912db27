"""`mx-rl doctor`: looks at the address, the clock, the store, ports, NIXL and TLS, and says what to do."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import anyio
from rich.console import Console
from rich.text import Text

from modelexpress_rl.cli import common, doctor_host, doctor_server
from modelexpress_rl.cli.findings import Finding, Verdict
from modelexpress_rl.printable import printable

_MARKS = {
    Verdict.OK: ("ok  ", "green"),
    Verdict.WARN: ("warn", "yellow"),
    Verdict.FAIL: ("FAIL", "red"),
    Verdict.SKIP: ("-   ", "dim"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.add_server(parser, timeout_s=5.0)
    parser.add_argument("--no-nixl", action="store_true", help="leave NIXL out: starting it takes seconds")
    common.add_json(parser, "one JSON object")


def run(options: argparse.Namespace) -> int:
    """Look at everything; answers 0 where nothing failed, and 1 otherwise.

    Raises:
        UsageError: an option can't be read.
    """
    findings = anyio.run(_look, options)
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if options.json:
        print(common.dump({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(common.console(), findings)
    return int(failed)


async def _look(options: argparse.Namespace) -> list[Finding]:
    findings = await doctor_server.look(options.server, common.timeout_s(options))
    findings += doctor_host.look_at_ports()
    findings += doctor_host.look_at_limits()
    if not options.no_nixl:
        findings.append(await doctor_host.look_at_nixl())
    return findings


def _print(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        line = Text(mark, style=style)
        line.append(f" {finding.subject}: ", style="bold").append(printable(finding.found), style="default")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"       -> {finding.advice}"), soft_wrap=True)
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    console.print(
        f"{counts[Verdict.FAIL]} failed, {counts[Verdict.WARN]} to look at, {counts[Verdict.OK]} well"
    )
