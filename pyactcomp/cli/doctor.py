"""The command ``doctor``: print the findings of ``examine``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from ..sizes import size_text
from .examine import examine
from .shared import console


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Report the working and failing parts of pyactcomp on this machine, with remedies; exit with 1 on a failure."""
    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        _print_findings(findings)
    if findings["problems"]:
        raise typer.Exit(1)


def _print_findings(findings: dict[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, version in findings["versions"].items():
        grid.add_row(name, version or "none")
    for device in findings["devices"]:
        memory = device["memory_bytes"]
        grid.add_row(device["device"], device["name"] + (f", {size_text(memory)}" if memory else ""))
        if device["link"]:
            grid.add_row("", f"link: {device['link']}")
    console.print(grid)

    table = Table(box=box.SIMPLE)
    for heading in ("implementation", "on", "state"):
        table.add_column(heading)
    for name, entry in findings["implementations"].items():
        if entry["unavailable_reason"]:
            state = f"not available: {entry['unavailable_reason']}"
        else:
            state = entry["self_test"] or "works: same bytes as the reference"
        table.add_row(name, entry["device"], state)
    console.print(table)

    console.print(_allocator_lines(findings["allocator"]), soft_wrap=True)
    console.print(f"observer: {findings['observer'] or 'works'}", soft_wrap=True)
    private = findings["torch_private"]
    sound = sum(wrong is None for wrong in private.values())
    console.print(f"private torch names that behave as expected: {sound} of {len(private)}")
    for problem in findings["problems"]:
        console.print(f"problem: {problem}", style="red", soft_wrap=True)
    if not findings["problems"]:
        console.print("everything that should work here works")


def _allocator_lines(entry: dict[str, Any]) -> str:
    missing, variable = entry["torch_subclass"], entry["variable"]
    works = f"works; {missing}" if missing else "works"
    reason = entry["unavailable_reason"]
    line = f"allocator: {f'not available: {reason}' if reason else works}"
    return f"{line}\n{_variable_line(variable)}" if variable else line


def _variable_line(state: dict[str, Any]) -> str:
    if state["attached"]:
        effect = "the allocator is attached"
    elif state["problem"]:
        effect = "no effect"
    else:
        effect = "the allocator is attached as torch initialises CUDA" if state["on"] else "off"
    reader = f"read by {state['file']}" if state["file"] else "no pyactcomp.pth in site-packages reads it"
    return f"PYACTCOMP_ALLOCATOR: {state['value'] or 'not set'}, {effect}; {reader}"
