"""An event simulation as a Chrome trace: one row for each link, one box for each chunk on it.

The format is the Trace Event Format that ``chrome://tracing`` and Perfetto open; times are in microseconds.
"""

from __future__ import annotations

import json

from topoplan.simulation.events import Run


def chrome_trace(run: Run) -> str:
    """The trace of a run as JSON text.

    Rows stand in the order of the links; a box carries its shard, stage, chunk and ranks. A channel that starts later
    than the launch has a row of its own, with one box until then.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.simulation.events import run_events
    >>> run = run_events(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"), nbytes=1 << 20)
    >>> events = json.loads(chrome_trace(run))["traceEvents"]
    >>> sum(event["ph"] == "X" for event in events) == len(run.transfers)
    True
    """
    used = sorted({transfer.link for transfer in run.transfers})
    rows: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": run.fabric.topology.name}}
    ]
    for position, number in enumerate(used):
        link = run.fabric.links[number]
        name = f"{link.src} -> {link.dst} ({link.channel})"
        for key, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": position})):
            rows.append({"name": key, "ph": "M", "pid": 0, "tid": number, "args": args})
    for number, (channel, start) in enumerate(run.starts, start=len(run.fabric.links)):
        name = f"{channel}: peer access is switched"
        ends = {"ts": 0.0, "dur": round(start * 1e6, 4), "pid": 0, "tid": number}
        rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": channel}})
        rows.append({"name": name, "cat": "start", "ph": "X", **ends, "args": {}})
    for transfer in run.transfers:
        rows.append(
            {
                "name": f"shard {transfer.shard} stage {transfer.stage} chunk {transfer.chunk}",
                "cat": f"shard{transfer.shard}",
                "ph": "X",
                "ts": round(transfer.start * 1e6, 4),
                "dur": round((transfer.end - transfer.start) * 1e6, 4),
                "pid": 0,
                "tid": transfer.link,
                "args": {
                    "shard": transfer.shard,
                    "stage": transfer.stage,
                    "chunk": transfer.chunk,
                    "from rank": transfer.src,
                    "to rank": transfer.dst,
                },
            }
        )
    body = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}\n'
