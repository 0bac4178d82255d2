"""Write results.md and results.svg from the measurements in a directory.

    python3 report.py DIRECTORY

Each WORK.tsv has lines "work, peer, variant, run, metric, value", after comments that say on which machine, of which
versions, and why a peer is left out.
"""

import html
import pathlib
import statistics
import sys

WORKS = {
    "a": ("Business transaction with one event recorded", "transactions a second; more is better"),
    "b": ("Backlog of 100,000 events fanned out to 3 subscribers", "events a second; more is better"),
    "c": ("300,000 jobs consumed that do nothing", "jobs a second; more is better"),
    "d": ("From commit to consumer", "milliseconds after COMMIT has returned to the writer; less is better"),
    "e": ("An old snapshot held, 500,000 events deep",
          "events or jobs a second in the first and in the last tenth; 1.0 of the start is best"),
    "f": ("5,000,000 handled events in the tables", "events a second fanned out of a backlog of 100,000; 1.0 is best"),
    "g": ("1,000 subscriptions of which 3 match",
          "events a second fanned out of a backlog of 100,000; 1.0 is best"),
    "h": ("2,000 events a second for 3 subscribers, with retention", "6,000 jobs a second are due; start and end alike is best"),
}


class Work:
    """The measurements of one work."""

    def __init__(self, path):
        self.name = path.stem
        self.machine = self.commit = ""
        self.why_not, self.versions = {}, {}
        self.values = {}    # row -> metric -> values, by run
        self.metrics = []
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                self.comment(line[2:])
                continue
            _, peer, variant, _, metric, value = line.split("\t")
            row = (peer, "" if variant == "-" else variant)
            if value in ("", "nan"):
                continue
            self.values.setdefault(row, {}).setdefault(metric, []).append(float(value))
            if metric not in self.metrics:
                self.metrics.append(metric)

    def comment(self, text):
        key, _, rest = text.partition(": ")
        if key == "machine":
            self.machine = rest
        elif key.startswith("version "):
            self.versions[key[8:]] = rest
        elif key.startswith("why not "):
            self.why_not[key[8:]] = rest
        else:
            self.commit = text

    def median(self, row, metric):
        values = self.values.get(row, {}).get(metric)
        return statistics.median(values) if values else None

    def rows(self, metric=None, descending=True):
        """Rows, best first."""
        rows = list(self.values)
        if metric is None:
            return rows
        known = [r for r in rows if self.median(r, metric) is not None]
        return sorted(known, key=lambda r: self.median(r, metric), reverse=descending)

    def ratio(self, row, above, below):
        """Median of the ratios, run by run."""
        pairs = zip(self.values.get(row, {}).get(above, []), self.values.get(row, {}).get(below, []))
        ratios = [a / b for a, b in pairs if b]
        return statistics.median(ratios) if ratios else None


def label(row):
    return f"{row[0]}, {row[1]}" if row[1] else row[0]


def number(value):
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}"


def cell(work, row, metric):
    values = work.values.get(row, {}).get(metric)
    if not values:
        return "-"
    text = number(statistics.median(values))
    if len(values) > 1:
        text += f" <sub>{number(min(values))}–{number(max(values))}</sub>"
    return text


def table(head, lines):
    out = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    out += ["| " + " | ".join(line) + " |" for line in lines]
    return out + [""]


def write_work(work):
    title, unit = WORKS[work.name]
    out = [f"## {work.name}. {title}", "", f"{unit[0].upper()}{unit[1:]}. Median, and least and most of the runs.", ""]
    if work.name in "abc":
        main = work.metrics[-2] if work.name == "a" and len(work.metrics) > 1 else work.metrics[0]
        if "tx/s, 16 clients" in work.metrics:
            main = "tx/s, 16 clients"
        lines = [[label(r)] + [cell(work, r, m) for m in work.metrics] for r in work.rows(main)]
        out += table([""] + work.metrics, lines)
    elif work.name == "d":
        after = [m for m in work.metrics if "from sending" not in m]
        before = [m for m in work.metrics if "from sending" in m]
        out += table([""] + after, [[label(r)] + [cell(work, r, m) for m in after] for r in work.rows(after[0], False)])
        out += ["Where fewer than 1,000 events a second were committed, the writers themselves were held up (16 connections),",
                "and the figures are of that lower rate.", ""]
        out += ["The same from the moment in which the writer sent COMMIT, its flush included:", ""]
        out += table([""] + [m.replace(" from sending COMMIT", "") for m in before],
                     [[label(r)] + [cell(work, r, m) for m in before] for r in work.rows(before[0], False)])
    elif work.name == "e":
        for what in ("fan-out", "jobs"):
            rows = [r for r in work.rows(f"{what}, end")]
            if not rows:
                continue
            out += table([what, "start", "end", "end / start", "dead rows"],
                         [[label(r), cell(work, r, f"{what}, start"), cell(work, r, f"{what}, end"),
                           number(work.ratio(r, f"{what}, end", f"{what}, start")), cell(work, r, f"{what}, dead rows")]
                          for r in rows])
    elif work.name in "fg":
        below, above = work.metrics[:2]
        out += table(["", below, above, "ratio"],
                     [[label(r), cell(work, r, below), cell(work, r, above), number(work.ratio(r, above, below))]
                      for r in work.rows(above)])
    else:
        metrics = [m for m in work.metrics if not m.startswith("memory")]
        out += table([""] + [label(r) for r in work.rows()],
                     [[m] + [cell(work, r, m) for r in work.rows()] for m in metrics])
        lines = []
        for row in work.rows():
            for metric in work.metrics:
                if metric.startswith("memory") and ", start," in metric and metric in work.values[row]:
                    end = metric.replace(", start,", ", end,")
                    lines.append([label(row), metric[len("memory of "):].split(", start")[0],
                                  cell(work, row, metric), cell(work, row, end)])
        if lines:
            out += ["Memory of its own (not shared) of each process, MB:", ""]
            out += table(["", "process", "start", "end"], lines)
    missing = sorted(p for p in work.versions if p not in {r[0] for r in work.values})
    for peer in missing + sorted(set(work.why_not) - set(missing)):
        out.append(f"- {peer}: - ({work.why_not.get(peer, 'does not do this work')})")
    return out + ([""] if out[-1] else [])


def ratios(works):
    """The ratios that the targets are about."""
    lines = []

    def line(what, ours, other, name, least):
        if ours is not None and other:
            lines.append([what, f"{ours / other:.2f}", name, least])

    def best(work, metric, rows, descending=True):
        rows = [r for r in work.rows(metric, descending) if rows(r)]
        return (work.median(rows[0], metric), label(rows[0])) if rows else (None, "")

    def is_peer(r):
        return r[0] not in ("outbox", "plain")

    if "a" in works:
        w, m = works["a"], "tx/s, 16 clients"
        for v in ("stopped", "relayed"):
            ours = w.median(("outbox", v), m)
            line(f"a, 16 clients: outbox ({v}) / plain insert", ours, w.median(("plain", "insert"), m), "plain insert",
                 "≥ 0.95" if v == "stopped" else "")
            line(f"a, 16 clients: outbox ({v}) / insert and NOTIFY", ours, w.median(("plain", "notify"), m),
                 "plain notify", "≥ 2" if v == "stopped" else "")
            other, name = best(w, m, is_peer)
            line(f"a, 16 clients: outbox ({v}) / best peer", ours, other, name, "> 1" if v == "stopped" else "")
    if "b" in works:
        w, m = works["b"], "events/s"
        ours = w.median(("outbox", ""), m)
        other, name = best(w, m, lambda r: is_peer(r) and r[0] != "pgq")
        line("b: outbox / best peer that writes a row for each event and subscriber", ours, other, name, "> 1")
        line("b: outbox / PgQ, which writes none", ours, w.median(("pgq", ""), m), "pgq", "")
    if "c" in works:
        w, m = works["c"], "jobs/s"
        engines = ("graphile-worker", "pg-boss", "river", "pgmq")
        other, name = best(w, m, lambda r: r[0] in engines)
        for v in ("kept", "deleted"):
            ours = w.median(("outbox", v), m)
            line(f"c: outbox ({v}) / best engine", ours, other, name, "≥ 2")
            same, same_name = best(w, m, lambda r: r[0] in engines and r[1] == v)
            line(f"c: outbox ({v}) / best engine, jobs {v}", ours, same, same_name, "")
        line("c: outbox (kept) / PgQ", w.median(("outbox", "kept"), m), w.median(("pgq", ""), m), "pgq", "")
    if "d" in works:
        w = works["d"]
        for mode in ("idle", "1,000/s"):
            for q in ("p50", "p99"):
                m = f"{mode}, {q} ms"
                other, name = best(w, m, is_peer, False)
                line(f"d, {mode}, {q}: outbox / best peer", w.median(("outbox", ""), m), other, name,
                     "< 1" if q == "p50" else "")
    for k, above, below, least in (("e", "fan-out, end", "fan-out, start", "≥ 0.9"), ("e", "jobs, end", "jobs, start", "≥ 0.9"),
                                   ("f", "5,000,000 handled", "empty tables", "≥ 0.9"),
                                   ("g", "1,000 subscriptions", "3 subscriptions", "≥ 0.9"),
                                   ("h", "jobs/s, end", "jobs/s, start", "≥ 0.95")):
        if k in works:
            for row in works[k].rows():
                r = works[k].ratio(row, above, below)
                if row[0] == "outbox" and r is not None:
                    lines.append([f"{k}: {label(row)}: {above} / {below}", f"{r:.2f}", "itself", least])
    if not lines:
        return []
    return ["## Ratios", "", "Both sides in one run on one machine; only these mean anything elsewhere.", ""] + \
        table(["", "ratio", "against", "reach"], lines)


# Chart: one panel a work, bars sorted, ours in colour.
WIDTH, LABEL, BAR, GAP, TITLE = 900, 210, 15, 5, 46


def panel(y, title, unit, bars, log=False):
    import math
    out = [f'<text x="10" y="{y + 18}" class="t">{html.escape(title)}</text>',
           f'<text x="10" y="{y + 34}" class="u">{html.escape(unit)}</text>']
    y += TITLE
    top = max(v for _, v, _ in bars)
    low = min(v for _, v, _ in bars if v > 0) / 2
    for name, value, ours in bars:
        space = WIDTH - LABEL - 90
        if log:
            width = space * (math.log(value / low) / math.log(top / low)) if value > 0 and top > low else 1
        else:
            width = space * value / top if top else 1
        out.append(f'<text x="{LABEL - 8}" y="{y + BAR - 3}" class="l">{html.escape(name)}</text>'
                   f'<rect x="{LABEL}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}" class="{"o" if ours else "p"}"/>'
                   f'<text x="{LABEL + max(width, 1) + 6:.1f}" y="{y + BAR - 3}" class="v">{number(value)}</text>')
        y += BAR + GAP
    return out, y + 18


def chart(works):
    panels = []

    def add(work, metric, title, unit, descending=True, log=False):
        rows = work.rows(metric, descending)
        bars = [(label(r), work.median(r, metric), r[0] == "outbox") for r in rows]
        if bars:
            panels.append((title, unit, bars, log))

    def add_ratio(work, above, below, title, unit):
        bars = [(label(r), work.ratio(r, above, below), r[0] == "outbox") for r in work.rows()]
        bars = sorted([b for b in bars if b[1] is not None], key=lambda b: -b[1])
        if bars:
            panels.append((title, unit, bars, False))

    for k, w in works.items():
        title, unit = WORKS[k]
        title = f"{k}. {title}"
        if k == "a":
            m = "tx/s, 16 clients" if "tx/s, 16 clients" in w.metrics else w.metrics[0]
            add(w, m, title, f"{m}; more is better")
        elif k in "bc":
            add(w, w.metrics[0], title, unit, log=True)
            if panels:
                panels[-1] = (panels[-1][0], unit + "; logarithmic", *panels[-1][2:])
        elif k == "d":
            for mode in ("idle", "1,000/s"):
                add(w, f"{mode}, p50 ms", f"{title}, {mode}", "p50, ms; less is better; logarithmic", False, True)
        elif k == "e":
            for what in ("fan-out", "jobs"):
                add_ratio(w, f"{what}, end", f"{what}, start", f"{title}: {what}", "rate at the end / at the start; 1 is best")
        elif k in "fg" and len(w.metrics) >= 2:
            add_ratio(w, w.metrics[1], w.metrics[0], title, "rate with them / without; 1 is best")
        elif k == "h":
            add(w, "p99 ms, end", title, "p99 at the end, ms; less is better; logarithmic", False, True)
    body, y = [], 6
    for p in panels:
        lines, y = panel(y, *p)
        body += lines
    machine = next(iter(works.values())).machine if works else ""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 24}" font-family="sans-serif" font-size="12">',
        "<style>.t{font-size:15px;font-weight:bold}.u{fill:#666}.l{text-anchor:end}.v{fill:#333}.o{fill:#c2410c}.p{fill:#94a3b8}</style>",
        f'<rect width="{WIDTH}" height="{y + 24}" fill="white"/>', *body,
        f'<text x="10" y="{y + 12}" class="u">Median of the runs. {html.escape(machine)}</text>', "</svg>", ""])


def main(directory):
    directory = pathlib.Path(directory)
    works = {}
    for name in WORKS:
        path = directory / f"{name}.tsv"
        if path.exists():
            work = Work(path)
            if work.values:
                works[name] = work
    out = ["# outbox beside other queues", "",
           "Written by `bash test/bench/peers.sh`. Settings, versions and reasons: [configuration.md](configuration.md).", "",
           "![chart](results.svg)", ""]
    for state in dict.fromkeys((w.machine, w.commit) for w in works.values()):
        names = ", ".join(k for k, w in works.items() if (w.machine, w.commit) == state)
        out += [f"Works {names}: {state[0]}; {state[1]}.", ""]
    out += ratios(works)
    for work in works.values():
        out += write_work(work)
    while out and not out[-1]:
        out.pop()
    (directory / "results.md").write_text("\n".join(out) + "\n")
    (directory / "results.svg").write_text(chart(works))


if __name__ == "__main__":
    main(sys.argv[1])
