"""The work of every stage: one thin function per call, and what the calls share.

Knows the folders and whom to call; not what runs after what (`stages.py`), nor how anything is done (each stage's own module).
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from draftsmith.config import Config
from draftsmith.environment import describe_environment
from draftsmith.errors import UserError, first_line
from draftsmith.eval.results import YARDSTICKS
from draftsmith.eval.settings import checked_folder, is_folder, result_name
from draftsmith.files import publish_json, publish_text
from draftsmith.progress import ticker
from draftsmith.summaries import account_lines, notes, rows_table, training_lines
from draftsmith.tracking import Tracking

if TYPE_CHECKING:
    from draftsmith.data.cache.online import AnyCache
    from draftsmith.data.documents import Documents
    from draftsmith.data.rows import Row, Rows
    from draftsmith.eval.acceptance import PlainRuns
    from draftsmith.eval.drafters import Drafter
    from draftsmith.eval.prompts import Prompt
    from draftsmith.models.target import Target
TRAINED = "distilled"  # the draft LM's name; its starting point is "untrained"


def served(config: Config) -> list[str]:
    """The drafts of the evaluation without its yardsticks."""
    return [draft for draft in dict.fromkeys(config.evaluation.drafts) if draft not in YARDSTICKS]


class Work:
    """The stages' calls, and what they share: corpus, target and cache are opened once, when first needed."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.config, self.run, self.say = config, config.run, say
        self.tracking = Tracking(
            config.tracking.trackers, config.tracking.project, self.run, config.model_dump(mode="json"), self.device
        )

    @property
    def target_path(self) -> str:
        """Folder or hub name of the target."""
        path = self.config.target.path
        if path is None:
            return str(self.run / "target")
        local = Path(path).expanduser()
        return str(local) if local.exists() else path

    @property
    def device(self) -> str:
        """Where everything is computed. The schema admits `auto` and `cpu` alone: GPU devices come with a later version."""
        return "cpu"

    @functools.cached_property
    def documents(self) -> "Documents":
        from draftsmith.data.corpus import load_documents

        return load_documents(self.config.data, self.run)

    @functools.cached_property
    def target(self) -> "Target":
        from draftsmith.models.target import Target

        settings = self.config.target
        return Target.load(self.target_path, settings.dtype, self.device, settings.trust_remote_code)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer alone: rows need no weights."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.target_path, trust_remote_code=self.config.target.trust_remote_code
            )
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise UserError(f"target.path: {self.target_path} has no usable tokenizer ({reason})") from error

    @functools.cached_property
    def reader(self) -> "AnyCache":
        from draftsmith.data.cache.online import OnlineRows
        from draftsmith.data.cache.reader import CacheReader

        if self.config.cache.online:
            return OnlineRows(self.target, self.rows("train"), self.config.cache)
        reader = CacheReader(self.run / "cache", self.target.fingerprint())
        if damage := reader.verify():  # every byte, once: a flipped one would be trained on without a sign
            raise UserError(f"{self.run / 'cache'}: {damage[0]}; run `draftsmith cache-repair CONFIG`")
        return reader

    @functools.cached_property
    def prompts(self) -> dict[str, list["Prompt"]]:
        """What is decoded: the user's questions, or held-out rows. Says what is odd about them."""
        from draftsmith.data.contamination import begun
        from draftsmith.eval.acceptance import held_out_prompts, questions
        from draftsmith.eval.prompts import Writer

        settings = self.config.evaluation
        found: dict[str, list[Prompt]] = {}
        if settings.questions is None:
            held_out = held_out_prompts(self.rows("held_out"), settings, self.target.context)
            found.update({domain: list(asked) for domain, asked in held_out.items()})
        else:
            found, remarks = questions(self.target, settings)
            for remark in remarks:
                self.say(f"eval-acceptance: {remark}")
        writer = Writer(self.target, settings.template)
        ids = [writer.first(prompt) for asked in found.values() for prompt in asked]
        if repeated := begun(self.rows("train"), ids):
            self.say(f"eval-acceptance: warning: {repeated} of {len(ids)} prompts also begin training rows")
        return found

    @functools.cached_property
    def plain(self) -> "PlainRuns":
        """Plain greedy decoding of the prompts, done once for all drafts."""
        from draftsmith.eval.acceptance import PlainRuns

        return PlainRuns()

    def rows(self, split: str) -> "Rows":
        from draftsmith.data.rows import Rows

        return Rows.open(self.run / "rows", split)

    def train_target(self) -> None:
        """Tokenizer, rows of the whole corpus, weights."""
        from draftsmith.data.prepare import prepare
        from draftsmith.data.rows import Rows
        from draftsmith.data.tokenizer import train_tokenizer
        from draftsmith.train.pretrain import pretrain

        scratch, folder = self.config.target.scratch, self.run / "target-rows"
        tokenizer = train_tokenizer(self.documents, scratch.vocabulary)
        whole = self.config.data.model_copy(update={"train_tokens": {}, "held_out_tokens": {}})
        prepare(whole, tokenizer, folder, self.documents)
        train, held_out = (Rows.open(folder, split) for split in ("train", "held_out"))
        log, place = self.tracking.log("target"), self.run / "target"
        self._summary(pretrain(tokenizer, train, held_out, scratch, place, self.config.seed, log, self.device))

    def check_target(self) -> None:
        """A target that exists already: its folder must hold weights, and its tokenizer must load."""
        path = Path(self.config.target.path or "").expanduser()
        looks_local = path.is_absolute() or str(self.config.target.path).startswith((".", "~")) or len(path.parts) > 2
        if not path.exists() and looks_local:
            raise UserError(
                f"target.path: {path} does not exist; give a model's folder, a hub name, or null to train one"
            )
        if path.exists() and not any(path.glob("*.safetensors")):
            raise UserError(
                f"target.path: {path} has no *.safetensors weights; give a model's folder, or null to train one"
            )
        self.say(f"target: {self.target_path}, {len(self.tokenizer):,} tokens in its vocabulary")

    def prepare(self) -> None:
        """Rows with loss masks, cut as the target's tokenizer says."""
        from draftsmith.data.prepare import prepare

        summary = prepare(self.config.data, self.tokenizer, self.run / "rows", self.documents)
        Console().print(rows_table(summary))
        for line in notes(summary):
            self.say(line)

    def regenerate(self) -> None:
        """Answers of the target to the questions of the data, as rows for another config's data."""
        from draftsmith.data.answer import LocalEngine, ServerEngine
        from draftsmith.data.regenerate import Conversation, Engine, regenerate

        settings, folder = self.config.regenerate, self.run / "regenerated"
        identity = settings.identity()
        if settings.base_url is None:
            engine: Engine = LocalEngine(self.target, settings)
            identity |= {"target": self.target.fingerprint()}
        else:
            engine = ServerEngine(settings)
        conversations = (Conversation(document.messages, document.tools) for document in self.documents)
        with ticker("regenerate", len(self.documents), "documents") as progress:
            account = regenerate(conversations, engine, identity, folder, progress)
        for line in account_lines(account, folder):
            self.say(line)

    def cache(self) -> None:
        """What the target knows about the rows, on disk. With `cache.online` it is computed while a draft is trained."""
        if self.config.cache.online:
            self.say("cache: online, computed by the target during training; nothing is written")
            return
        if self.config.cache.imported is not None:
            self._build_cache()
            return
        from draftsmith.data.cache.build import remove_foreign
        from draftsmith.data.cache.ranks import launched_ranks

        ranks = launched_ranks(on_cpu=self.device == "cpu")
        if ranks.index == 0 and (
            other := remove_foreign(self.run / "cache", self.target.fingerprint(), self.rows("train"))
        ):
            self.say(f"cache: made for other {' and '.join(other)}; removed {self.run / 'cache'} to make it anew")
        ranks.barrier()
        self._build_cache()

    def repair_cache(self) -> None:
        """Every byte of the cache checked, and just the damaged shards made again."""
        from draftsmith.data.cache.manifest import remove_unreadable

        if self.config.cache.online:
            raise UserError("cache.online: true has no cache to repair; set it to false")
        if found := remove_unreadable(self.run / "cache"):
            self.say(f"cache-repair: {found}; the cache is made again")
        about = self._build_cache()
        for line in about["rebuilt"]:
            self.say(f"cache-repair: rebuilt {line}")
        if not about["written_shards"]:
            self.say("cache-repair: every checksum is right, nothing was rebuilt")

    def _build_cache(self) -> dict[str, Any]:
        from draftsmith.data.cache.build import build_cache
        from draftsmith.data.importers import import_states

        if self.config.cache.imported is not None:
            about = import_states(self.target, self.config.cache, self.run / "cache")
        else:
            about = build_cache(self.target, self.rows("train"), self.run / "cache", self.config.cache)
        size = f"{about['bytes'] / 1e6:,.1f} MB, {about['bytes_per_token']:,.0f} bytes per token"
        self.say(
            f"cache: {about['rows']:,} rows, {about['tokens']:,} tokens, {size}, kept mass {about['kept_mass']:.4f}"
        )
        if about["dropped_rows"]:
            self.say(f"cache: {about['dropped_rows']:,} rows dropped: the target's states are not finite in them")
        return about

    def distill(self) -> None:
        """The draft LM, and its untrained start."""
        from draftsmith.train.distill import distill

        log = self.tracking.log("distill")
        summary = distill(
            self.target,
            self.reader,
            self.rows("held_out"),
            self.config.distill,
            self.run / "draft",
            self.config.seed,
            log,
        )
        self._summary(dataclasses.asdict(summary))

    def train_eagle(self, name: str) -> None:
        """One EAGLE head."""
        from draftsmith.train.eagle import train_eagle

        settings, folder, log = self.config.eagle[name], self.run / "eagle" / name, self.tracking.log(name)
        summary = train_eagle(self.target, self.reader, self.rows("held_out"), settings, folder, self.config.seed, log)
        self._summary(dataclasses.asdict(summary))

    def evaluate(self, draft: str) -> None:
        """One draft's acceptance, speed and exactness, as `eval/<draft>.json`."""
        from draftsmith.eval.acceptance import evaluate
        from draftsmith.eval.depth_one import depth_one, on_texts
        from draftsmith.evaluate import document, trained_match

        settings = self.config.evaluation
        total = len(settings.rounds()) * sum(map(len, self.prompts.values()))
        name = result_name(draft)
        drafter, about = self._drafter(draft)
        texts = self._texts()
        with ticker(f"eval-acceptance {name}", total, "prompts") as progress:
            results = evaluate(self.target, drafter, self.prompts, settings, self.plain, progress.advance, texts)
        path = self.config.target.path or "target"
        found = document(self.target, about, path, settings, self.prompts, results)
        trained = held_out = None
        if draft == TRAINED or draft in self.config.eagle:
            trained = trained_match(self.run / "draft" if draft == TRAINED else self.run / "eagle" / draft)
            rows = self.config.eagle.get(draft, self.config.distill).held_out_rows
            held_out = on_texts(self.target, drafter, self._first_held_out(rows))
        publish_json(self.run / "eval" / f"{name}.json", found | {"depth_one": depth_one(results, trained, held_out)})
        self.tracking.results(name, results)

    def _texts(self) -> list["Row"]:
        """The first held-out rows of every domain that is evaluated, as many as the evaluation wants."""
        rows, chosen = self.rows("held_out"), []
        wanted = dict.fromkeys(self.prompts, self.config.evaluation.held_out_rows)
        for index in range(len(rows)):
            if wanted.get(domain := rows.domain(index)):
                wanted[domain] -= 1
                chosen.append(rows[index])
        return chosen

    def _first_held_out(self, count: int) -> list["Row"]:
        rows = self.rows("held_out")
        return [rows[index] for index in range(min(count, len(rows)))]

    def tune(self) -> None:
        """The best draft and setting for this target and workload: tune.json and skill-speculative-tuning.md."""
        from draftsmith.eval.prompts import Writer
        from draftsmith.eval.skill import skill_page
        from draftsmith.eval.tune import Tuner

        found = {result_name(draft): self._drafter(draft) for draft in served(self.config)}
        drafters = {name: drafter for name, (drafter, _) in found.items()}
        about = {name: about | {"taps": list(drafters[name].taps)} for name, (_, about) in found.items()}
        writer = Writer(self.target, self.config.evaluation.template)
        prompts = {domain: [writer.first(prompt) for prompt in asked] for domain, asked in self.prompts.items()}
        tuner = Tuner(self.target, drafters, prompts, self.config.tune, self.config.evaluation, self.say)
        document = tuner.run() | {"drafts": about}
        document["target"]["path"] = self.config.target.path or "RUN/target"
        publish_json(self.run / "tune.json", document)
        publish_text(self.run / "skill-speculative-tuning.md", skill_page(document))

    def _drafter(self, draft: str) -> tuple["Drafter", dict[str, Any]]:
        """The drafter of that name, and what the result says of it. Paths are relative to the run folder."""
        from draftsmith.eval.decode import as_drafter
        from draftsmith.eval.drafters import EagleDrafter, LMDrafter, MedusaDrafter, PromptLookup
        from draftsmith.models.draft import DraftLM

        if draft == "prompt-lookup":
            return PromptLookup(), {"kind": draft, "path": None, "parameters": 0}
        if draft == "oracle":
            return LMDrafter(self.target), {"kind": draft, "path": None, "parameters": _parameters(self.target.model)}
        if draft in self.config.eagle:
            drafter = as_drafter(self.run / "eagle" / draft, self.target)
            assert isinstance(drafter, EagleDrafter | MedusaDrafter)
            about = {"kind": drafter.head.config.kind, "path": f"eagle/{draft}"}
            return drafter, about | {"parameters": _parameters(drafter.head)}
        if is_folder(draft):
            folder = checked_folder(draft, "evaluation.drafts:")
            found = as_drafter(folder, self.target)
            assert isinstance(found, EagleDrafter | MedusaDrafter | LMDrafter)
            held = found.model.model if isinstance(found, LMDrafter) else found.head
            kind = "draft-lm" if isinstance(found, LMDrafter) else found.head.config.kind
            return found, {"kind": kind, "path": str(folder), "parameters": _parameters(held)}
        model = DraftLM.load(self.run / "draft" / draft, self.target)
        return LMDrafter(model), {"kind": "draft-lm", "path": f"draft/{draft}", "parameters": _parameters(model.model)}

    def report(self) -> None:
        """The page, and where it was made."""
        from draftsmith.eval.report import build_report
        from draftsmith.eval.results import load_results

        page = build_report(self.run)
        self.tracking.report(load_results(self.run), page)
        self.say(f"report: {page}")

    def write_environment(self) -> None:
        """environment.json: what the run's numbers were made on."""
        publish_json(self.run / "environment.json", describe_environment())

    def _summary(self, summary: dict[str, Any]) -> None:
        for line in training_lines(summary):
            self.say(line)


def _parameters(module: Any) -> int:
    """Stored numbers of a `torch` module; a tensor that two places share counts once."""
    return sum(tensor.numel() for tensor in module.parameters())
