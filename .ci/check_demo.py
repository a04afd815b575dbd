"""What must hold in the results of any demo: exactness, the oracle's arithmetic, and a floor on a trained draft."""

import json
import sys
from pathlib import Path
from typing import Any

FLOOR = ("eagle3", "code", 2.0)  # draft, domain, tokens per verify at T = 0


def check(run: Path) -> list[str]:
    """One line per result that does not hold."""
    files = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))["results"] for path in (run / "eval").glob("*.json")
    }
    faults = [f"{run}: no results"] if not files else []
    for draft, results in files.items():
        for entry in results:
            where = f"{draft}, {entry['domain']}, T = {entry['temperature']}"
            if entry["temperature"] == 0.0 and entry["identical"][0] != entry["identical"][1]:
                faults.append(f"{where}: identical {entry['identical']} to plain greedy decoding")
            if draft == "oracle":
                faults += [f"{where}: {fault}" for fault in oracle(entry)]
    draft, domain, floor = FLOOR
    reached = [e for e in files.get(draft, []) if e["domain"] == domain and e["temperature"] == 0.0]
    if not reached or reached[0]["tokens_per_verify"]["value"] < floor:
        faults.append(
            f"{draft} on {domain}: {[e['tokens_per_verify'] for e in reached]} tokens per verify, the floor is {floor}"
        )
    return faults


def oracle(entry: dict[str, Any]) -> list[str]:
    """K + 1 tokens from every verify but each prompt's last: nothing is rejected, and only last steps are cut."""
    faults = []
    full = entry["K"] + 1
    if entry["temperature"] == 0.0 and any(position["value"] != 1.0 for position in entry["n_alpha"] if position):
        faults.append(f"the oracle was rejected: {entry['n_alpha']}")
    if not (entry["verifies"] - entry["prompts"]) * full < entry["tokens"] <= entry["verifies"] * full:
        faults.append(f"{entry['tokens']} tokens from {entry['verifies']} verifies of {full}")
    if entry["alpha"]["value"] < 0.999:
        faults.append(f"alpha of the oracle is {entry['alpha']['value']}")
    return faults


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]}: exact, the oracle is right, the floor holds")
    sys.exit(1 if found else 0)
