"""How often a rollout takes back a version that is no worse, and how soon one that is.

Simulated requests meet the rollout's own rule (`serving.rollout`) as it is set by default: a tenth
of them goes to the new version, then half, until each step has seen `min_requests` of it. Seconds
for a token are lognormal about a load that both versions share and that drifts (an autoregressive
process over the looks), so answers of one moment resemble each other, as on a real machine.

The peer looks at the same requests, at every tenth look, and takes a version back as soon as the
plain test at 1% of any one look says so: Fisher's exact test of failures, and Mann-Whitney's test
of seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import fisher_exact, mannwhitneyu

from benchmarks.harness import Check, at_least, at_most, record
from serving.rollout import FALSE_ALARM, Evidence, TrafficSample
from serving.settings import RolloutSettings

ROLLOUTS = 300
PEER_ROLLOUTS = 20
DETECTIONS = 60
PER_LOOK = 4.0
"""Requests that end between two looks, on average."""
DRIFT, LOAD = 0.98, 0.3
"""Of the load's logarithm: correlation from look to look, and standard deviation."""
PEER_LOOKS = 10
"""Of ours, to one of the peer's: it needs more arithmetic, and looks less often even so."""
SETTINGS = RolloutSettings()


@dataclass(frozen=True)
class Version:
    """How a version answers."""

    noise: float = 0.25
    """Standard deviation of the logarithm of an answer's seconds for a token."""
    times: float = 1.0
    """By which its slow answers take longer."""
    slow: float = 1.0
    """Share of its answers that are slow."""
    failing: float = 0.0
    """Share of its requests that fail."""
    deviation: float = 0.1
    """Of its bits from the evaluation's, as a multiple of what its weights' format explains."""

    def answer(self, requests: int, load: float, random: np.random.Generator) -> TrafficSample:
        """What is seen of so many requests under a load."""
        failed = int(random.binomial(requests, self.failing))
        seconds = load * random.lognormal(0, self.noise, requests - failed)
        seconds[random.random(len(seconds)) < self.slow] *= self.times
        read = random.random() < 0.1
        return TrafficSample(
            answered=requests - failed,
            failed=failed,
            seconds=seconds.tolist(),
            deviations=[self.deviation * random.exponential()] if read else [],
        )


def looks(
    new: Version, old: Version, random: np.random.Generator
) -> Iterator[tuple[TrafficSample, TrafficSample, float]]:
    """What each look of a whole rollout sees of both versions, and the new one's share."""
    load = random.normal()
    for share in SETTINGS.steps:
        answered = 0
        while answered < SETTINGS.min_requests:
            load = DRIFT * load + np.sqrt(1 - DRIFT**2) * random.normal()
            requests = int(random.poisson(PER_LOOK))
            of_new = int(random.binomial(requests, share))
            both = [(new, of_new), (old, requests - of_new)]
            seen = [one.answer(count, np.exp(LOAD * load), random) for one, count in both]
            answered += seen[0].answered
            yield seen[0], seen[1], share


def ours(new: Version, old: Version, random: np.random.Generator) -> int | None:
    """Requests of the new version after which it is taken back, or None where it never is."""
    evidence, requests = Evidence(SETTINGS), 0
    for seen, beside, share in looks(new, old, random):
        evidence.add(seen, beside, share)
        requests += seen.requests
        if evidence.against:
            return requests
    return None


def peer(new: Version, old: Version, random: np.random.Generator) -> int | None:
    """The same by plain tests at each look, each as if it were the only one."""
    first, second = TrafficSample(), TrafficSample()
    for number, (seen, beside, _) in enumerate(looks(new, old, random)):
        first, second = first.then(seen), second.then(beside)
        if number % PEER_LOOKS or min(first.answered, second.answered) < SETTINGS.block:
            continue
        table = [[one.failed, one.answered] for one in (first, second)]
        fails = fisher_exact(table, "greater").pvalue
        slower = mannwhitneyu(first.seconds, second.seconds, alternative="greater").pvalue
        if min(fails, slower) < FALSE_ALARM:
            return first.requests
    return None


EQUAL = {
    "equal": Version(),
    "equal_noisy": Version(noise=0.6),
    "equal_with_one_slow_in_five": Version(times=5.0, slow=0.2),
    "equal_with_failures": Version(failing=0.02),
}
WORSE = {
    "a_fifth_slower": (Version(times=1.2), Version()),
    "a_fifth_slower_noisy": (Version(noise=0.4, times=1.2), Version(noise=0.4)),
    "half_slower_noisy": (Version(noise=0.6, times=1.5), Version(noise=0.6)),
    "one_in_five_at_double": (Version(times=2.0, slow=0.2), Version()),
    "one_in_five_at_five_times": (Version(times=5.0, slow=0.2), Version()),
    "two_in_a_hundred_fail": (Version(failing=0.02), Version()),
    "three_in_a_hundred_fail_beside_one": (Version(failing=0.03), Version(failing=0.01)),
    "bits_differ_from_the_evaluation": (Version(deviation=3.0), Version()),
}
PROMISED = (
    *(
        "a_fifth_slower",
        "one_in_five_at_five_times",
        "two_in_a_hundred_fail",
        "bits_differ_from_the_evaluation",
    ),
)
FOUND = 0.95
"""Share of rollouts in which what is promised is seen."""


def main() -> None:
    """Simulate, print a line for each case, and record the worst false alarm and what is seen."""
    random = np.random.default_rng(0)
    checks: dict[str, Check] = {}
    alarms = {"ours": 0.0, "peer": 0.0}
    for name, version in EQUAL.items():
        found = [ours(version, version, random) is not None for _ in range(ROLLOUTS)]
        plainly = [peer(version, version, random) is not None for _ in range(PEER_ROLLOUTS)]
        share, plain = sum(found) / ROLLOUTS, sum(plainly) / PEER_ROLLOUTS
        alarms = {"ours": max(alarms["ours"], share), "peer": max(alarms["peer"], plain)}
        checks[f"rolled back: {name}"] = at_most(share, FALSE_ALARM)
        print(f"{name}: {share:.2%} taken back, by plain tests {plain:.0%}", flush=True)
    for name, (new, old) in WORSE.items():
        after = [ours(new, old, random) for _ in range(DETECTIONS)]
        seen = [requests for requests in after if requests is not None]
        share = len(seen) / DETECTIONS
        median = float(np.median(seen)) if seen else float("nan")
        promised = name in PROMISED
        checks[f"rolled back: {name}"] = (
            at_least(share, FOUND) if promised else Check(share, "reported", True)
        )
        checks[f"median requests until rolled back: {name}"] = Check(median, "reported", True)
        print(f"{name}: {share:.1%} taken back, half of them by {median:.0f} requests", flush=True)
    record(
        "rollout_errors",
        [alarms["ours"]],
        [alarms["peer"]],
        "highest share of rollouts that roll back a version that is no worse",
        "plain tests at every tenth look",
        "lower",
        ["numpy", "scipy"],
        checks,
    )


if __name__ == "__main__":
    main()
