"""What a run's numbers amount to, in words: is its best draft worth having, where, and at which temperatures no longer.

Knows results; knows no page. "Faster" is said only where the whole interval of several prompts lies above 1, and what
is slower than plain decoding is said before what is faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.eval.results import Measure, Result, headline, names

HOT = 1.0  # above this temperature the report says in words whether speculation still pays


@dataclass(frozen=True)
class Verdict:
    """The first line of a report, what it rests on, and how it is meant: "inexact", "faster", "slower" or "unmeasured"."""

    tone: str
    claim: str
    detail: str = ""

    @property
    def text(self) -> str:
        """Both sentences."""
        return f"{self.claim} {self.detail}".strip()


def verdict(results: list[Result]) -> Verdict:
    """What the run's best draft is worth, from the measured numbers alone.

    A greedy output that differs from plain decoding, of any draft, is said before all else: such a speed is worth nothing.
    """
    worth = _worth(results)
    wrong = [(draft, of - same, of) for draft, same, of in exactness(results) if same < of]
    if not wrong:
        return worth
    parts = [
        f"{draft}{'' if i else ' differs from plain decoding'} on {count} of {of}{'' if i else ' prompts'}"
        for i, (draft, count, of) in enumerate(wrong)
    ]
    return Verdict("inexact", f"NOT EXACT: {_listed(parts)}.", worth.text)


def _worth(results: list[Result]) -> Verdict:
    chosen = headline(results)
    if not chosen:
        return Verdict("unmeasured", "No draft of this run has been measured yet: run eval-acceptance.")
    draft, temperature, K = chosen[0].draft, chosen[0].temperature, chosen[0].K
    measured = [(r.domain, r.tokens_per_verify) for r in chosen if r.tokens_per_verify is not None]
    tokens = [f"{m.value:.2f}{'' if i else ' tokens per verify'} on {domain}" for i, (domain, m) in enumerate(measured)]
    emits = f"{draft} emits {_listed(tokens)} at T = {temperature:g}, K = {K}"
    timed = [result for result in usual(results, chosen[0]) if result.speedup is not None]
    if not timed:
        return Verdict("unmeasured", f"{emits}.", "Its speed against plain decoding was not measured.")
    said = []
    if slower := [result for result in timed if _gain(result) == "slower"]:
        said.append(f"slower than plain decoding{_where(slower, timed)}: {_range(_speeds(slower), 2)}× its speed")
    if faster := [result for result in timed if _gain(result) == "faster"]:
        plain = "" if said else " than plain decoding"
        said.append(f"{_range(_speeds(faster), 2)}× faster{plain}{_where(faster, timed)}")
    if even := [result for result in timed if _gain(result) == "even"]:
        over = "" if said else " over plain decoding"
        said.append(f"no clear gain{over}{_where(even, timed)} ({_range(_speeds(even), 2)}×)")
    text = "; ".join(said)
    tone = "slower" if slower else "faster" if faster else "unmeasured"
    return Verdict(tone, f"{text[0].upper()}{text[1:]}.", f"{emits}.")


def usual(results: Sequence[Result], like: Result) -> list[Result]:
    """All results of a draft with the K and tree of `like`; of two ways of drafting the one that emits more per verify."""
    best: dict[tuple[str, float], Result] = {}
    for result in results:
        if (result.draft, result.K, result.tree) == (like.draft, like.K, like.tree):
            place = (result.domain, result.temperature)
            if place not in best or _tokens(result) > _tokens(best[place]):
                best[place] = result
    return list(best.values())


def _tokens(result: Result) -> float:
    return 0.0 if result.tokens_per_verify is None else result.tokens_per_verify.value


def _gain(result: Result) -> str:
    """ "faster", "slower" or "even", of a result that was timed."""
    assert result.speedup is not None
    # One prompt has no interval. A file that states no count is taken at its word.
    sure = result.speedup.low > 1.0 and result.speedup.count != 1
    return "slower" if result.speedup.value < 1.0 else "faster" if sure else "even"


def _speeds(results: Sequence[Result]) -> list[Measure]:
    return [result.speedup for result in results if result.speedup is not None]


def _where(some: Sequence[Result], all_timed: Sequence[Result]) -> str:
    """ " on code and prose at T = 1.5", and nothing where it is everywhere."""
    if len(some) == len(all_timed):
        return ""
    several = len({result.temperature for result in all_timed}) > 1
    at: dict[tuple[str, ...], list[float]] = {}  # domains -> the temperatures of just these
    for temperature in sorted({result.temperature for result in some}):
        own = tuple(result.domain for result in some if result.temperature == temperature)
        whole = tuple(result.domain for result in all_timed if result.temperature == temperature)
        at.setdefault(() if own == whole and several else own, []).append(temperature)
    parts = []
    for places, temperatures in at.items():
        place = f"on {_listed(places)}" if places else ""
        time = f"at T = {_listed([f'{t:g}' for t in temperatures])}" if several else ""
        parts.append(f"{place} {time}".strip())
    return " " + _listed(parts)


def _range(measures: Sequence[Measure], digits: int) -> str:
    low, high = (f"{bound(m.value for m in measures):.{digits}f}" for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def exactness(results: list[Result]) -> list[tuple[str, int, int]]:
    """(draft, identical, compared): greedy outputs that equal plain greedy decoding, summed over domains and K."""
    counts = []
    for draft in names(results):
        pairs = [r.identical for r in results if r.draft == draft and r.identical is not None and r.temperature == 0.0]
        if pairs:
            counts.append((draft, sum(same for same, _ in pairs), sum(of for _, of in pairs)))
    return counts


@dataclass(frozen=True)
class Heat:
    """One draft at one temperature, drafted in one way: ranges over the domains, as text."""

    temperature: float
    drafting: str
    alpha: str
    tokens: str
    speedup: str
    pays: str


def sweep(results: list[Result]) -> list[Heat]:
    """The run's best draft at every temperature and way of drafting, the coldest first. Empty below two temperatures."""
    chosen = headline(results)
    own = [r for r in results if chosen and (r.draft, r.K, r.tree) == (chosen[0].draft, chosen[0].K, chosen[0].tree)]
    kinds = sorted({(r.temperature, r.drafting) for r in own}, key=lambda kind: (kind[0], kind[1] == "greedy"))
    if len({temperature for temperature, _ in kinds}) < 2:
        return []
    return [_heat([r for r in own if (r.temperature, r.drafting) == kind]) for kind in kinds]


def _heat(own: Sequence[Result]) -> Heat:
    def shown(measures: Sequence[Measure | None], unit: str = "") -> str:
        found = [measure for measure in measures if measure is not None]
        return _range(found, 2) + unit if found else "–"

    return Heat(
        own[0].temperature,
        own[0].drafting,
        shown([result.alpha for result in own]),
        shown([result.tokens_per_verify for result in own]),
        shown([result.speedup for result in own], "×"),
        pays(own),
    )


def pays(own: Sequence[Result]) -> str:
    """Whether speculation is faster than plain decoding in these results; what would have to hold where none was timed."""
    timed = [result for result in own if result.speedup is not None]
    if not timed:
        tokens = [_tokens(result) for result in own if result.tokens_per_verify is not None]
        return (
            f"if a verify and its drafting take less than {min(tokens):.2f} plain steps" if tokens else "not measured"
        )
    words = {"faster": "yes", "even": "not measurably", "slower": "no"}
    kinds = [kind for kind in words if any(_gain(result) == kind for result in timed)]
    if len(kinds) == 1:
        return words[kinds[0]]
    return "; ".join(f"{words[kind]} on {_listed([r.domain for r in timed if _gain(r) == kind])}" for kind in kinds)


def hot_notes(heats: Sequence[Heat]) -> list[str]:
    """One sentence for each temperature above 1: what became of α, and whether speculation still pays."""
    cold = heats[0] if heats else None
    notes = []
    for temperature in dict.fromkeys(heat.temperature for heat in heats if heat.temperature > HOT):
        ways = [heat for heat in heats if heat.temperature == temperature]
        assert cold is not None
        alphas = _listed([f"{heat.alpha} with {heat.drafting} drafting" for heat in ways])
        gains = _listed([f"{heat.drafting}: {heat.pays} ({_measured(heat)})" for heat in ways])
        before = f"at T = {cold.temperature:g} it was {cold.alpha}"
        notes.append(f"At T = {temperature:g} α is {alphas}; {before}. Does speculation still pay? {gains}.")
    return notes


def _measured(heat: Heat) -> str:
    return f"{heat.tokens} tokens per verify" + (f", {heat.speedup} the plain speed" if heat.speedup != "–" else "")
