#!/usr/bin/env python3
# The tables of docs/measurements from `lode bench kernels --json`: kernels_table.py FILE.jsonl...
# Several files are several readings of the same cases; the better one counts, as inside a reading.
import json
import sys


def load(paths):
    best = {}
    for path in paths:
        with open(path) as lines:
            for line in lines:
                c = json.loads(line)
                key = (c["format"], c["isa"], c["rows"], c["threads"], c["resident"])
                if key not in best or c["gb_per_s"] > best[key]["gb_per_s"]:
                    best[key] = c
    return best


def unique(cases, field):
    return list(dict.fromkeys(c[field] for c in cases.values()))


def table(cases, threads, resident, cell, title):
    isas, rows = unique(cases, "isa"), sorted(unique(cases, "rows"))
    print(f"\n{title}\n\n| format | " + " | ".join(isas) + " |\n|---|" + "---|" * len(isas))
    for name in unique(cases, "format"):
        cells = []
        for isa in isas:
            found = [cases.get((name, isa, r, threads, resident)) for r in rows]
            cells.append(" / ".join(cell(c) for c in found if c))
        print(f"| {name} | " + " | ".join(cells) + " |")


def main(paths):
    cases = load(paths)
    wrong = [c for c in cases.values() if not c["bits_ok"]]
    print(f"{len(cases)} cases, {len(wrong)} with wrong bits")
    rows = " / ".join(str(r) for r in sorted(unique(cases, "rows")))
    most = max(unique(cases, "threads"))
    table(cases, most, False, lambda c: f"{c['gb_per_s']:.1f}", f"Streaming, {most} threads, GB/s at {rows} rows:")
    table(cases, most, False, lambda c: f"{c['read_bandwidth_share']:.2f}", f"The same as share of the vector-read bandwidth:")
    table(cases, 1, True, lambda c: f"{c['gb_per_s']:.1f}", f"Resident, one thread, GB/s at {rows} rows:")
    table(cases, 1, True, lambda c: f"{c['ns_per_block']:.2f}", f"Resident, one thread, ns per block at {rows} rows:")


main(sys.argv[1:])
