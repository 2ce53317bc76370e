"""What runs on a GPU, against the CPU: every rule, the server's step, the noise, and a whole parameter server over
loopback; and how near the kernel is to memory.

Run it through ``benchmarks/gpu_check.sh``. It imports nothing beyond torch, numpy and scipy, and for the parameter
server (:mod:`gpu_loopback`) grpcio and protobuf. ``--device cpu`` runs that one alone, once more on the CPU in the
GPU's place: what it prints then says nothing of a GPU, and shows that the check itself works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common.aggregation import BEFORE, RULES, RoundContext, Rule, SumRule, make_rule
from common.aggregation.kernels import trimmed
from common.aggregation.kernels.gpu import TritonKernel
from common.aggregation.weights import WeightedRule
from ps.privacy.released import Unreleased
from ps.update import Mechanism, advance, initial_state, release

SKIPPED = 77
N, F, D = 20, 4, 1_000_000
GOAL = 1.3  # times the duration of a device copy of as many bytes, at n = 20
STEP_PARAMETERS = {"bucketing": {"size": 2}}


def main() -> int:
    asked = arguments()
    loopback = partial(check_loopback, asked.device, asked.clients, asked.dimension, asked.rounds)
    if asked.device == "cpu":
        print(f"on the CPU, torch {torch.__version__}: the loopback alone, without a GPU; all other checks are skipped")
        return run_checks({"loopback": loopback})
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here; run this where there is a GPU")
        print("skipped too: the parameter server over loopback; --device cpu runs it without a GPU")
        return SKIPPED
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return run_checks(
        {
            "rules": check_rules,
            "hostile rows": check_hostile_rows,
            "sums on the grid": check_grid_sums,
            "server step": check_server_step,
            "noise": check_noise,
            "throughput": check_throughput,
            "loopback": loopback,
        }
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What runs on a GPU, against the CPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the loopback alone")
    parser.add_argument("--clients", type=int, default=N, help="of the loopback")
    parser.add_argument("--dimension", type=int, default=D, help="of the loopback's model")
    parser.add_argument("--rounds", type=int, default=20, help="of the loopback")
    return parser.parse_args()


def run_checks(checks: dict[str, Callable[[], list[str]]]) -> int:
    started = time.monotonic()
    failures = []
    for title, check in checks.items():
        print(f"\n== {title} ({time.monotonic() - started:.0f} s)", flush=True)
        try:
            failures += check()
        except Exception as error:  # the other checks are still worth their time on this machine
            failures.append(f"{title}: {type(error).__name__}: {error}")
            print(failures[-1])
    print(f"\n{time.monotonic() - started:.0f} s in all")
    for failure in failures:
        print(f"FAILED {failure}")
    print("FAILED" if failures else "all passed")
    return 1 if failures else 0


def every_rule(n: int, f: int) -> dict[str, Rule]:
    """All registered rules, and the mean behind each step."""
    rules = {name: make_rule(name, num_byzantine=f) for name in RULES}
    for name in BEFORE:
        step = {"name": name, **STEP_PARAMETERS.get(name, {})}
        rules[f"{name} + mean"] = make_rule("mean", num_byzantine=f, before=[step])
    return {name: rule for name, rule in rules.items() if rule.minimum_clients <= n}


def context_of(n: int, d: int, device: str) -> RoundContext:
    """The same on both devices; the generator starts anew."""
    return RoundContext(
        weights=torch.full((n,), 1.0 / n, dtype=torch.float64, device=device),
        centre=torch.zeros(d, device=device),
        generator=np.random.default_rng(0),
    )


def compare(name: str, rule: Rule, x: torch.Tensor) -> tuple[str | None, float]:
    """The rule on the GPU against the CPU, which computes in float64: what differs, and the scaled difference."""
    n, d = x.shape
    ours = rule(x.cuda(), context_of(n, d, "cuda"))
    if ours.device.type != "cuda" or ours.dtype != torch.float32:
        return f"{name}: returned {ours.dtype} on {ours.device}", 0.0
    there, here = ours.cpu().double(), rule(x, context_of(n, d, "cpu")).double()
    if not torch.equal(torch.isfinite(there), torch.isfinite(here)):
        return f"{name}: finite in other places than on the CPU", 0.0
    finite = torch.isfinite(here)
    scale = max(float(here[finite].abs().max()) if finite.any() else 0.0, 1e-30)
    difference = float((there - here)[finite].abs().max()) / scale if finite.any() else 0.0
    return (f"{name}: differs by {difference:.1e} of the scale" if difference > 1e-6 else None), difference


def check_rules() -> list[str]:
    """Random rows with a large common mean and f outliers; timed at (20, 4, 1M), compared at a tenth of the columns."""
    failures = []
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((N, D), dtype=np.float32)) + 3.0
    x[:F] *= -5.0
    large = x.cuda()
    for name, rule in every_rule(N, F).items():
        try:
            failure, difference = compare(name, rule, x[:, : D // 10].contiguous())
            context = context_of(N, D, "cuda")
            duration = seconds(lambda: rule(large, context), repetitions=5)  # noqa: B023 - called before the next turn
            print(f"{name:32} {duration * 1e3:9.3f} ms   difference {difference:.1e}", flush=True)
        except Exception as error:
            failure = f"{name}: {type(error).__name__}: {error}"
            print(failure)
        failures += [failure] if failure else []
    return failures


def check_hostile_rows() -> list[str]:
    """f rows of NaN, ±inf, 1e30: what comes out is the same on both devices."""
    failures = []
    honest = np.random.default_rng(1).standard_normal((N, 4099), dtype=np.float32)
    for attack in (np.nan, np.inf, -np.inf, 1e30):
        x = honest.copy()
        x[:F] = attack
        for name, rule in every_rule(N, F).items():
            try:
                failure, _ = compare(f"{name} under {attack}", rule, torch.from_numpy(x))
            except Exception as error:
                failure = f"{name} under {attack}: {type(error).__name__}: {error}"
            failures += [failure] if failure else []
    print(f"{len(failures)} differ")
    return failures


def check_grid_sums() -> list[str]:
    """Kept sums of grid multiples have the bits of the CPU, by the kernel and by sorting, whatever the shape."""
    failures = []
    rng = np.random.default_rng(2)
    for n, f, d in [
        (1, 0, 5),
        (3, 1, 1),
        (9, 4, 1001),
        (20, 4, 100_000),
        (50, 10, 4096),
        (21, 4, 777),
        (300, 15, 999),
    ]:
        x = torch.from_numpy((rng.integers(-(2**20), 2**20 + 1, (n, d)) * 2.0**-20).astype(np.float32))
        rule = make_rule("trimmed_mean", num_byzantine=f)
        wanted = rule.kept_sum(x)[0]
        wide = x.cuda().repeat_interleave(2, dim=1)
        for label, rows in {"": x.cuda(), " in columns apart": wide[:, ::2], " in rows apart": wide[:, :d]}.items():
            reference = wanted if "rows" not in label else rule.kept_sum(rows.cpu())[0]
            found = rule.kept_sum(rows)[0].cpu()
            if not torch.equal(found.view(torch.int64), reference.view(torch.int64)):
                failures.append(f"kept sums of ({n}, {f}, {d}){label} differ from the CPU's")
        kernel = trimmed._best.get(("cuda", n, f))
        print(f"n = {n:3}, f = {f:2}: {type(kernel).__name__ if kernel else 'sort'}")
        if n <= 64 and not isinstance(kernel, TritonKernel):
            failures.append(f"n = {n}, f = {f} was sorted: Triton did not compile (see the warning)")
    return failures


def check_server_step() -> list[str]:
    """Aggregate, noise, momentum, model step: on the grid the two devices agree to the bit."""
    failures = []
    rng = np.random.default_rng(3)
    for name in RULES:
        rule = make_rule(name, num_byzantine=F)
        if isinstance(rule, WeightedRule):
            rule = rule.with_weights([1.0 / N] * N)
        try:
            mechanism = Mechanism(rule=rule, num_clients=N, num_byzantine=F, clip_norm=1.0, noise_multiplier=1.0)
            x = torch.from_numpy(rng.standard_normal((N, D // 10), dtype=np.float32))
            for row in x:
                mechanism.condition(row)
            noise = rng.standard_normal(x.shape[1])
            states = {}
            for device in ("cpu", "cuda"):
                context = context_of(*x.shape, device)
                released = release(mechanism, Unreleased(x.to(device)), range(N), noise, context)
                state = initial_state(torch.zeros(x.shape[1], device=device))
                states[device] = advance(state, released, 0.1, 0.9)
            here, there = states["cpu"].theta, states["cuda"].theta.cpu()
            close = float((here - there).abs().max()) <= 1e-6 * float(here.abs().max())
            if not close or (isinstance(rule, SumRule) and not torch.equal(here, there)):
                failures.append(f"server step with {name}: θ differs by {float((here - there).abs().max()):.1e}")
        except Exception as error:
            failures.append(f"server step with {name}: {type(error).__name__}: {error}")
    rule = make_rule("trimmed_mean", num_byzantine=F)
    mechanism = Mechanism(rule=rule, num_clients=N, num_byzantine=F, clip_norm=1.0, noise_multiplier=1.0)
    rows, noise = torch.zeros((N, D), device="cuda"), torch.zeros(D, dtype=torch.float64).pin_memory()
    state = initial_state(torch.zeros(D, device="cuda"))
    duration = seconds(lambda: advance(state, release(mechanism, Unreleased(rows), range(N), noise), 0.1, 0.9))
    print(f"trimmed_mean, ({N}, {F}, {D:,}), with noise from the host: {duration * 1e3:.3f} ms")
    return failures


def check_noise() -> list[str]:
    """Noise is drawn in float64 on the host and uploaded: it must arrive as it left."""
    noise = np.random.default_rng(4).standard_normal(D)
    pageable = torch.from_numpy(noise)
    pinned = pageable.pin_memory()
    for label, source in (("pageable", pageable), ("pinned", pinned)):
        duration = seconds(lambda: source.to("cuda", non_blocking=True))  # noqa: B023 - called before the next turn
        print(f"{label:9} {duration * 1e3:.3f} ms, {source.nbytes / duration / 1e9:.1f} GB/s")
    arrived = [torch.equal(source.cuda().cpu(), pageable) for source in (pageable, pinned)]
    moments = pinned.cuda()
    normal = abs(float(moments.mean())) < 5e-3 and abs(float(moments.std()) - 1.0) < 5e-3
    return [] if all(arrived) and normal else ["noise on the device is not what the host drew"]


def check_throughput() -> list[str]:
    for line in throughput_table():
        print(line)
    ratio = _throughput(N, F, 10_000_000)[2]
    return [] if ratio <= GOAL else [f"trimmed mean at n = {N}: {ratio:.2f} times a device copy (goal {GOAL})"]


def throughput_table() -> list[str]:
    """Bytes that the trimmed mean moves per second, against those of a device copy: lines of Markdown."""
    of = f"against a device copy of as many bytes (goal at n = 20: within {GOAL}×)"
    lines = [
        f"{torch.cuda.get_device_name()}. Bytes read and written per second, {of}.",
        "",
        "| n, f, d | trimmed mean, ms | GB/s | device copy, GB/s | over the copy |",
        "|---|---|---|---|---|",
    ]
    for n, f, d in [(20, 4, 1_000_000), (20, 4, 10_000_000), (50, 10, 1_000_000)]:
        duration, copied, ratio = _throughput(n, f, d)
        moved = (n + 1) * d * 4
        lines.append(
            f"| {n}, {f}, {d:,} | {duration * 1e3:.3f} | {moved / duration / 1e9:.0f} | {moved / copied / 1e9:.0f} "
            f"| {ratio:.2f}× |"
        )
    return lines


def _throughput(n: int, f: int, d: int) -> tuple[float, float, float]:
    x = torch.randn((n, d), device="cuda")
    rule = make_rule("trimmed_mean", num_byzantine=f)
    rule.prepare(n, d, "cuda")
    duration = seconds(lambda: rule(x))
    elements = (n + 1) * d // 2  # each is read and written
    source, target = torch.empty(elements, device="cuda"), torch.empty(elements, device="cuda")
    copied = seconds(lambda: target.copy_(source))
    return duration, copied, duration / copied


def check_loopback(device: str, clients: int, dimension: int, rounds: int) -> list[str]:
    """A parameter server with its inbox on the device, against one on the CPU."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        import gpu_loopback  # here alone: the other checks need neither grpcio nor protobuf
    except ImportError as problem:
        return [f"loopback: {problem} (it needs grpcio and protobuf)"]
    return gpu_loopback.check_loopback(device, gpu_loopback.Setting(clients, dimension, rounds))


def seconds(function: Callable[[], object], repetitions: int = 20) -> float:
    """Median duration by the device's own clock, after three calls that do not count."""
    for _ in range(3):
        function()
    durations = []
    for _ in range(repetitions):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        stop.synchronize()
        durations.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(durations)


if __name__ == "__main__":
    sys.exit(main())
