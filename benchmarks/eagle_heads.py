"""The heads of the EAGLE study: the trainer's settings of each, in the order in which they are trained. Knows neither torch nor
claims."""

from typing import Any

K = 5  # tokens of a chain, and rollout steps that are measured
NEW_TOKENS = 32  # that every prompt is continued by
#: Which distribution teaches: the cache's default, and for the losses that a sample of it estimates with a bias the whole one.
TEACHERS: dict[str, dict[str, Any]] = {"sampled": {"k": 64}, "full": {"distribution": "from_last"}}
SHARED: dict[str, Any] = {"batch_tokens": 256, "other_lr": 0.0006, "validations": 1, "held_out_rows": 1}
#: Four value heads: the layer's start has room for a guess as wide as the head (`models.eagle_start.start_from_embedding`).
EAGLE3: dict[str, Any] = {"kind": "eagle3", "kv_heads": 4, "rollouts": 4, "matrix_lr": 0.04}
PLAIN = EAGLE3 | {"embedding_start": False}  # the layer starts at random
STATES = EAGLE3 | {"states_start": True, "matrix_lr": 0.005}  # at EAGLE3's rate the start is lost
REGRESSION = 10.0  # EAGLE-1's mixture: 1 · regression + 0.1 · cross-entropy
EAGLE1: dict[str, Any] = {
    "kind": "eagle1",
    "kv_heads": 4,
    "rollouts": 1,
    "feature_loss": REGRESSION,
    "matrix_lr": 0.04,
}
EAGLE1_STATES = EAGLE1 | {"states_start": True, "matrix_lr": 0.005}
HELPED = STATES | {"taps": "with last", "feature_loss": REGRESSION, "teacher": "full"}
#: The heads, those of the first claims first: a study that is cut short has these. `teacher` is not of the trainer's settings.
ROWS: dict[str, dict[str, Any]] = {
    "eagle1": EAGLE1,
    "eagle3": EAGLE3,
    "eagle3, low, middle and last tap": EAGLE3 | {"taps": "with last"},
    "eagle3, all that helps": HELPED,
    "eagle1, start from the states": EAGLE1_STATES,
    "eagle3, no rollouts": EAGLE3 | {"rollouts": 1},
    "plain start": PLAIN,
    "plain start, no rollouts": PLAIN | {"rollouts": 1},
    "plain start, no rollouts, feature loss": PLAIN | {"rollouts": 1, "feature_loss": REGRESSION},
    "eagle1, token alone": EAGLE1 | {"inputs": "token"},
    "eagle1, feature alone": EAGLE1 | {"inputs": "feature"},
    "eagle1, feature and unshifted token": EAGLE1 | {"inputs": "unshifted"},
    "eagle1, no feature loss": EAGLE1 | {"feature_loss": 0.0},
    "eagle3, feature loss": EAGLE3 | {"feature_loss": REGRESSION},
    "eagle3, one tap": EAGLE3 | {"taps": "last"},
    "eagle3, 2 rollouts": EAGLE3 | {"rollouts": 2},
    "eagle3, 7 rollouts": EAGLE3 | {"rollouts": 7},
    "eagle3, detached": EAGLE3 | {"detach": True},
    "eagle3, decay 0.8": EAGLE3 | {"decay": 0.8},
    "full teacher, KL": EAGLE3 | {"teacher": "full"},
    "full teacher, -log acceptance": EAGLE3 | {"teacher": "full", "loss": "negative_log_acceptance"},
    "full teacher, adaptive": EAGLE3 | {"teacher": "full", "loss": "adaptive_kl_tv"},
    "full teacher, TV": EAGLE3 | {"teacher": "full", "loss": "total_variation"},
    "eagle3, start from the states": STATES,
    "random head": PLAIN | {"head_from_target": False},
    "eagle3, V/2": EAGLE3 | {"draft_vocabulary": 2048},
    "eagle3, V/4": EAGLE3 | {"draft_vocabulary": 1024},
    "medusa": {"kind": "medusa", "rollouts": K, "decay": 0.8, "matrix_lr": 0.04},
    "eagle1, HASS": EAGLE1 | {"rollouts": 3, "detach": True},
    "eagle3, norms of 3.1": EAGLE3 | {"norm_taps": True, "norm_state": True},
}
#: All their seeds come before any other row, and they are also measured with the dynamic tree.
FIRST = ("eagle1", "eagle3")
WITH_TREE = (*FIRST, "eagle3, all that helps", "eagle1, start from the states", "plain start", "medusa")
#: Chosen on held-out texts that nothing else is measured on, with a seed of their own.
TUNING_SEED = 1000
TUNED: dict[str, dict[str, Any]] = {
    f"tuning: {kind}, matrix_lr {lr:g}": settings | {"matrix_lr": lr}
    for kind, settings, rates in (
        ("eagle1", EAGLE1, (0.02, 0.04, 0.08)),
        ("eagle3", EAGLE3, (0.02, 0.04, 0.08)),
        ("eagle3, all that helps", HELPED, (0.0025, 0.005, 0.01)),
        ("eagle1, start from the states", EAGLE1_STATES, (0.0025, 0.005, 0.01)),
    )
    for lr in rates
}
