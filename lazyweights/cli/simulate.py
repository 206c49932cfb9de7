"""``lazyweights simulate``: a coded file in a modelled decode unit, and what a token would cost on a machine."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from lazyweights.cli.files import STDIO, require_coded, show_progress, work_through
from lazyweights.cli.messages import UsageError, count_text, printable, say, size_text
from lazyweights.cli.options import add_parser as add_verb_parser
from lazyweights.cli.options import add_verbosity
from lazyweights.cli.progress import progress_bar
from lazyweights.cli.tables import Column, print_table

if TYPE_CHECKING:
    from lazyweights.hardware.devices import Device
    from lazyweights.reports.unit_simulation import UnitReport

EXAMPLES = """\
  lazyweights encode --preset unit model.gguf -o model.unit.lw
  lazyweights simulate model.unit.lw                                    four engines, Jetson Orin Nano Super
  lazyweights simulate model.unit.lw --device macbook-m4 --engines 6 --context 16384
  lazyweights simulate model.unit.lw --bandwidth 51.2 --clock 0.8       another machine
  lazyweights simulate model.unit.lw --json | jq .places
  lazyweights simulate --list-devices

All figures are modelled: cycles by a cycle model that decodes the real streams, areas and energies from component tables,
times from bandwidths. docs/decode-unit.md says how, and what was assumed."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Add the parser of this verb."""
    summary = "run a coded file through a model of the decode unit: cycles, stalls, time per token"
    parser = add_verb_parser(verbs, "simulate", summary, EXAMPLES)
    parser.add_argument("file", nargs="?", metavar="FILE", help="coded file of the preset unit")
    parser.add_argument("--device", default=None, metavar="NAME", help="machine (default: orin-nano-super)")
    parser.add_argument("--list-devices", action="store_true", help="print the known machines")
    parser.add_argument("--bandwidth", type=_bandwidth, metavar="GB/S", help="DRAM bandwidth in 10^9 bytes/s")
    parser.add_argument("--clock", type=_clock, default=1.0, metavar="GHZ", help="clock of the unit (default: 1)")
    parser.add_argument("--engines", type=_count, default=4, metavar="N", help="engines of 32 lanes (default: 4)")
    parser.add_argument("--context", type=_tokens, default=4096, metavar="N", help="tokens in the KV cache (default: 4096)")
    parser.add_argument(
        "--tokens-per-pass", type=_at_least_one, default=1.0, metavar="X",
        help="tokens that one pass over the weights gives, as with prompt-lookup speculation (default: 1)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="OUT", help="write plots to OUT: .png, .svg or .pdf (needs matplotlib)")
    add_verbosity(parser, "draw no progress bar", "print the source of the bandwidth too")
    parser.set_defaults(run=run)


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _bandwidth(text: str) -> float:
    return _number(text, 1, 1e5, "a number of GB/s from 1 to 100000")


def _clock(text: str) -> float:
    return _number(text, 0.01, 10, "a number of GHz from 0.01 to 10")


def _at_least_one(text: str) -> float:
    return _number(text, 1, 1e3, "a number of at least 1")


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 to 1024")
    return int(text)


def _tokens(text: str) -> int:
    if not text.isdigit() or int(text) > 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Simulate the file; return the exit code."""
    if args.list_devices:
        _print_devices()
        return 0
    if args.file is None:
        raise UsageError("FILE is missing: a coded file of the preset unit")
    if args.file == STDIO or os.path.isdir(args.file):
        raise UsageError("simulate reads one coded file, neither standard input nor a directory")
    if args.plot is not None and not args.plot.lower().endswith(PLOT_SUFFIXES):
        raise UsageError(f"--plot {args.plot}: the name has to end in {', '.join(PLOT_SUFFIXES)}")
    device = _device(args)
    args.files = [args.file]
    return work_through(args, (".lw",), lambda path: _simulate(args, path, device))


def _device(args: argparse.Namespace) -> Device:
    import dataclasses

    from lazyweights.errors import LazyWeightsError
    from lazyweights.hardware.devices import find_device

    try:
        device = find_device(args.device or "orin-nano-super")
    except LazyWeightsError as error:
        raise UsageError(f"--device {args.device}: {error}") from error
    if args.bandwidth is None:
        return device
    label = f"{device.label}, other bandwidth" if args.device else "given bandwidth"
    return dataclasses.replace(
        device, label=label, bandwidth=args.bandwidth * 1e9, source="given; memory and energy as of " + device.label
    )


def _simulate(args: argparse.Namespace, path: str, device: Device) -> None:
    from lazyweights.container.encoder import Progress
    from lazyweights.container.reader import CodedFile
    from lazyweights.reports.unit_simulation import simulate_file

    require_coded(path)
    with CodedFile(path) as file, progress_bar(os.path.basename(path), show_progress(args)) as bar:
        size = file.layout.source_size

        def update(done: int, total: int) -> None:
            if bar is not None:
                bar(Progress(size * done // max(total, 1), size, 0, "simulate", ""))

        report = simulate_file(
            file, device, n_engines=args.engines, clock_hz=args.clock * 1e9, context=args.context,
            tokens_per_pass=args.tokens_per_pass, progress=update,
        )  # fmt: skip
    if args.plot is not None:
        from lazyweights.reports.unit_plots import plot_report

        plot_report(report, args.plot)
    if args.json:
        import json

        print(json.dumps(report.as_dict(), indent=2))
    else:
        print_report(report, verbose=args.verbose)
    if args.plot is not None and not args.quiet:
        say(f"{args.plot}: written")


def _print_devices() -> None:
    from lazyweights.hardware.devices import DEVICES

    columns = [Column("device", True), Column("name", True), Column("GB/s"), Column("memory, GB"), Column("source", True)]
    rows = [
        [d.key, d.label, f"{d.bandwidth / 1e9:g}", f"{d.memory_bytes / 1e9:g}", f"{d.source}"] for d in DEVICES.values()
    ]
    print_table(columns, rows)


def print_report(report: UnitReport, *, verbose: bool = False) -> None:
    """Print a report on stdout."""
    device = report.device
    covers = "keeps pace" if report.capacity >= report.required_rate else "does not keep pace"
    pairs = [
        ("machine", f"{device.label}, {device.bandwidth / 1e9:g} GB/s"),
        ("unit", f"{report.n_engines} engines of 32 lanes at {report.clock_hz / 1e9:g} GHz, {report.area_mm2:.3f} mm2"),
        ("decoded", f"{count_text(report.n_weights)} weights at {report.coded_bpw:.3f} coded bits per weight, codes compared"),
        ("passed by", f"{size_text(report.plain_bytes)} of tensors and row groups that are not coded"),
        ("needed", f"{report.required_rate / 1e9:.1f} G weights/s (8 x bandwidth / coded bits per weight)"),
        ("capacity", f"{report.capacity / 1e9:.1f} G weights/s with ample bandwidth: {covers} (modelled)"),
        ("reached", f"{report.unit_rate / 1e9:.1f} G weights/s with this bandwidth (modelled)"),
    ]
    if report.kv_bytes is None:
        pairs.append(("KV cache", "not counted: the file does not say its shape"))
    else:
        pairs.append(("KV cache", f"{size_text(round(report.kv_bytes))} at {report.context:,} tokens (fp16)"))
    if report.tokens_per_pass > 1:
        pairs.append(("speculation", f"{report.tokens_per_pass:g} tokens per pass over the weights (given)"))
    if verbose:
        pairs.append(("source", device.source))
    print(f"{printable(os.path.basename(report.path))} (modelled)")
    for key, value in pairs:
        print(f"  {key:<11}  {printable(value)}")
    names = list(report.types[0].losses)
    columns = [Column("type", True), Column("tensors"), Column("weights"), Column("coded bpw"), Column("cycles/weight")]
    columns += [Column(f"{name} %") for name in names]
    rows = [
        [
            row.type_name, str(row.n_tensors), count_text(row.n_weights), f"{row.coded_bpw:.3f}", f"{row.cycles_per_weight:.5f}",
            *(f"{100 * row.losses[name]:.1f}" if row.losses[name] else "" for name in names),
        ]
        for row in report.types
    ]  # fmt: skip
    print_table(columns, rows)
    columns = [
        Column("place (modelled)", True), Column("bytes/token"), Column("floor, ms"), Column("projected, ms"),
        Column("tokens/s"), Column("energy, mJ"), Column("fits", True),
    ]  # fmt: skip
    rows = []
    for cost in report.places:
        high = "" if cost.projected_high_ms == cost.projected_ms else f" - {cost.projected_high_ms:.2f}"
        rows.append([
            cost.place.value, size_text(round(cost.bytes_per_token)), f"{cost.floor_ms:.2f}", f"{cost.projected_ms:.2f}{high}",
            f"{cost.tokens_per_second:.1f}", f"{cost.energy_mj:.2f}", "yes" if cost.fits else "no",
        ])  # fmt: skip
    print_table(columns, rows)
