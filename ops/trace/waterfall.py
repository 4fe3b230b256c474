"""A request's life as a waterfall for the terminal. Pure: a story in, something rich can print out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.ops.trace.store import Stored
from baton.ops.trace.story import REQUEST_ID, Story

BAR_COLUMNS = 36


def waterfall(story: Story, list_steps: bool) -> RenderableType:
    """Header, one row a state with its bar, the steps, and the share of the time that is accounted for."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("state", no_wrap=True)
    table.add_column("owner", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("duration", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=BAR_COLUMNS)
    table.add_column("notes", overflow="fold")
    for stored in story.states:
        _add(table, story, stored, "cyan")
    if list_steps:
        for stored in story.steps:
            _add(table, story, stored, "magenta")
    elif story.steps:
        first, last = story.steps[0].span, story.steps[-1].span
        bar = _bar(story, first.start_ns, last.end_ns, "magenta")
        start, lasted = millis(first.start_ns - story.start_ns), millis(last.end_ns - first.start_ns)
        table.add_row(f"{len(story.steps)} steps", story.steps[0].process, start, lasted, bar, "first to last")
    covered = f"{100 * story.coverage():.1f} % of {millis(story.end_ns - story.start_ns)} accounted for"
    return Group(*_header(story), table, Text(covered, style="dim"))


def _header(story: Story) -> list[Text]:
    if story.root is None:
        return [Text(f"trace {story.trace_id}: the request has not ended, or its end is no longer on record", "yellow")]
    span = story.root.span
    facts = span.attributes
    title = Text(f"{span.name} {facts.get('gen_ai.request.model', '')}".rstrip(), style="bold")
    title.append(f"  {millis(span.end_ns - span.start_ns)}", style="bold green" if span.error is None else "bold red")
    title.append(f"  {facts.get('gen_ai.response.finish_reasons', '')}")
    title.append(
        f"  {facts.get('gen_ai.usage.input_tokens', '?')} tokens in, {facts.get('gen_ai.usage.output_tokens', '?')} out"
    )
    if facts.get("baton.lives", 1) != 1:
        title.append(f"  {facts['baton.lives']} lives", style="yellow")
    lines = [title, Text(f"request {facts.get(REQUEST_ID, '?')}  trace {story.trace_id}", style="dim")]
    return [*lines, Text(span.error, style="red")] if span.error is not None else lines


def _add(table: Table, story: Story, stored: Stored, style: str) -> None:
    span = stored.span
    notes = Text(", ".join(f"{name} +{millis(at_ns - story.start_ns)}" for name, at_ns in span.events))
    if span.error is not None:
        notes.append(f"{', ' if notes else ''}{span.error}", style="red")
        style = "red"
    table.add_row(
        span.name,
        str(span.attributes.get("baton.owner", stored.process)),
        millis(span.start_ns - story.start_ns),
        millis(span.end_ns - span.start_ns),
        _bar(story, span.start_ns, span.end_ns, style),
        notes,
    )


def _bar(story: Story, start_ns: int, end_ns: int, style: str) -> Text:
    """The span's place within the whole; at least a sliver, so that nothing is invisible."""
    whole = max(story.end_ns - story.start_ns, 1)
    begin = round((start_ns - story.start_ns) / whole * BAR_COLUMNS)
    end = round((end_ns - story.start_ns) / whole * BAR_COLUMNS)
    begin = min(max(begin, 0), BAR_COLUMNS - 1)
    return Text(" " * begin + ("█" * (min(end, BAR_COLUMNS) - begin) or "▏"), style=style)


def millis(duration_ns: int) -> str:
    """A duration for people, in ms."""
    return f"{duration_ns / 1e6:,.2f} ms"
