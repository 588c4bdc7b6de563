"""What the Spark stages may be told."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from artifacts.examples import Form
from artifacts.settings import Settings

COPIED_BY_PROCESS = 4_000
"""By default, most megabytes of files in buckets that one process copies: some two minutes."""

DOCUMENTS_IN_MEMORY = 4_000_000
"""By default, most documents that are decided over in the driver's memory: about 4 GB."""

HELD_OUT_IN_MEMORY = 500
"""By default, most megabytes of held-out text whose n-grams every task holds: 2.5 GB."""


class NearDuplicateSettings(Settings):
    """How near-copies are found: MinHash candidates, verified by true Jaccard similarity."""

    enabled: bool = True
    """Whether near-copies are looked for at all; exact copies always are."""
    threshold: float = Field(default=0.8, gt=0.3, le=1)
    """Least Jaccard similarity of the word-shingle sets of two near-copies."""
    shingle_words: int = Field(default=5, ge=1)
    """Words in a shingle; 5 tells an edited copy from a text on the same subject."""
    permutations: int = Field(default=126, ge=16, le=1024)
    """Length of a MinHash signature; 126 find 99.8% of the pairs at a threshold of 0.8."""


Probability = Annotated[float, Field(ge=0, le=1)]
QualityFilter = Literal["gopher_quality", "gopher_repetition", "c4", "fineweb"]


class DecontaminationSettings(Settings):
    """How text that evaluation uses is kept out of training."""

    ngram_size: int = Field(default=13, ge=5)
    """Words in an n-gram; 13 in a row hardly ever agree by chance."""
    maximum_overlap: float = Field(default=0.5, ge=0, le=1)
    """Share of a document's n-grams that may stand in evaluation text, or of one such text's in it;
    0.5, since below it is mostly set phrases and parameter lists."""


class ClassifierSettings(Settings):
    """A fastText model of your own that labels documents by language, quality or subject."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the column with the likeliest label; its probability stands under `<name>_score`."""
    model: str
    """The model, a `.bin` or `.ftz` file of `fasttext supervised`."""
    keep: dict[str, Probability] = Field(default_factory=dict)
    """Label, without `__label__`, to a probability: documents that reach none of them are
    dropped."""
    drop: dict[str, Probability] = Field(default_factory=dict)
    """Label to a probability from which documents are dropped, in place of `keep`; with neither,
    documents are only labeled."""

    @property
    def score_column(self) -> str:
        """The column with the probability."""
        return f"{self.name}_score"

    @model_validator(mode="after")
    def _one_of_two(self) -> "ClassifierSettings":
        if self.keep and self.drop:
            raise ValueError("give labels to keep or labels to drop, not both")
        return self


class TemplateSettings(Settings):
    """What becomes of texts that differ in figures, dates and ids alone: in words with a digit, and
    in English months and weekdays."""

    keep: int | None = Field(default=5, ge=1)
    """Most texts of a template that stay, those that came first; the others are dropped as
    `template`. `null` keeps all. Either way they share a split."""
    same_share: float = Field(default=0.5, gt=0, le=1)
    """Least share of a text's bytes that does not differ; below it, as in tables, the figures are
    the text. 1 looks for no templates."""


class SplitSettings(Settings):
    """How new text is divided. What was in a split before stays in it, whatever changes here."""

    validation: float = Field(default=0.05, gt=0, lt=1)
    """Share of the duplicate clusters that training may look at to choose; 5% is some hundred
    documents of a 10 MB text."""
    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Share that only the gate looks at."""
    seed: int = 0
    """Draws which new duplicate clusters are held out."""
    sources: dict[str, Literal["train", "validation", "held_out", "replay"]] = Field(
        default_factory=dict
    )
    """Source name to the split of all its text, such as `held_out` for evaluation files of your
    own, whose near-copies are kept out of training too. `replay` is general text, kept apart for
    training to replay at `checkpoint.replay_share`; what evaluation text holds of it is left out,
    to a run of words."""

    @model_validator(mode="after")
    def _leaves_training_text(self) -> "SplitSettings":
        if self.validation + self.held_out >= 1:
            raise ValueError("validation and held_out together leave nothing to train on")
        return self

    @property
    def replayed(self) -> list[str]:
        """The sources to replay."""
        return [name for name, split in self.sources.items() if split == "replay"]


class CleanCorpusSettings(Settings):
    """How raw text becomes clean text."""

    repair_encodings: bool = True
    """Repair, with ftfy, lines that show wrong decoding (`cafÃ©`)."""
    unicode_form: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normalization of the kept text; NFKC also replaces look-alikes such as ligatures."""
    minimum_characters: int = Field(default=100, ge=1)
    """Shorter documents are dropped, in characters after normalizing; stubs teach little."""
    maximum_characters: int = Field(default=10_000_000, ge=1)
    """Longer documents are dropped, in characters; past ten million it is mostly a data dump."""
    mask_personal_data: bool = False
    """Replaces e-mail and public IP addresses by examples; off, since manuals often need theirs."""
    quality_filters: list[QualityFilter] = Field(default_factory=list)
    """Filters of web text, applied in this order; technical text fails many."""
    classifiers: list[ClassifierSettings] = Field(default_factory=list)
    """Models that label documents, after the quality filters and in this order; what one drops, the
    next ones are not asked about."""
    near_duplicates: NearDuplicateSettings = NearDuplicateSettings()
    """Search for near-copies."""
    templates: TemplateSettings = TemplateSettings()
    """Search for texts of one template; examples of a task are none."""
    decontamination: DecontaminationSettings = DecontaminationSettings()
    """Removal of documents that overlap with the evaluation texts."""
    split: SplitSettings = SplitSettings()
    """How new text is divided into training, validation and held-out text."""
    examples_per_reason: int = Field(default=3, ge=0)
    """How many dropped documents are shown for each reason."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "CleanCorpusSettings":
        if self.maximum_characters < self.minimum_characters:
            raise ValueError(
                f"maximum_characters ({self.maximum_characters}) is below minimum_characters "
                f"({self.minimum_characters}), so every document would be dropped"
            )
        return self

    @model_validator(mode="after")
    def _classifiers_have_names(self) -> "CleanCorpusSettings":
        names = [one.name for one in self.classifiers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two classifiers have the name {name}; each needs its own")
        return self

    def content(self) -> dict[str, Any]:
        """What decides the clean corpus, but for what is in the classifiers' models."""
        content = self.model_dump(mode="json", exclude={"classifiers": {"__all__": {"model"}}})
        # No setting any more, but a part of the name of every clean corpus in a store: without it
        # all of them, and what follows from them, would be made again.
        return content | {"repeated_spans": {"action": "ignore", "minimum_words": 50}}

    def preparation(self) -> dict[str, Any]:
        """What of this decides how one document is prepared, apart from all others."""
        apart = {"examples_per_reason", "repeated_spans", "split"}
        return {key: value for key, value in self.content().items() if key not in apart}


MAXIMUM_WEIGHT = 100.0
"""Times that a source may be seen; more teaches it by heart."""


class SourceMix(Settings):
    """How much of one source is trained on; validation and held-out text are never sampled.

    One of these at most; documents are chosen by hashes of their ids.
    """

    weight: float = Field(default=1, ge=0, le=MAXIMUM_WEIGHT)
    """Times that the source is seen: 0.5 takes half its documents, 2 takes each twice."""
    token_budget: int | None = Field(default=None, ge=1)
    """About how many tokens to take."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """About which share of all training tokens to make it, seen as often as that takes."""
    documents: int | None = Field(default=None, ge=1)
    """About how many documents to take at most."""
    bytes: int | None = Field(default=None, ge=1)
    """About how many bytes of text to take at most."""

    @model_validator(mode="after")
    def _one_of_all(self) -> "SourceMix":
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) - (self.weight == 1) > 1:
            given = [name for name in given if name != "weight" or self.weight != 1]
            raise ValueError(f"give one of {' and '.join(given)}, not several")
        return self


class ExampleSettings(Settings):
    """How examples of a task become rows; plain text has none of this."""

    template: Literal["chat", "plain"] = "chat"
    """How conversations are written: by the base model's chat template, or each prompt, a newline
    and its answer."""
    chat_template: str | None = None
    """A Jinja chat template in place of the base model's; the trained model keeps it."""
    input_tokens: int = Field(default=256, ge=4)
    """Most tokens of a pair's input, or of a labeled text."""
    target_tokens: int = Field(default=30, ge=2)
    """Most tokens of a pair's target, its end token included."""
    input_prefix: str = ""
    """Put before a pair's input, such as T5's `summarize: `. The endpoint's `/predict`
    puts it before its inputs; a completion's prompt has to bring it."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    """What becomes of examples that are longer; those that are cut or dropped are counted."""
    labels: tuple[str, ...] = ()
    """The classes in the order of their numbers; by default those that occur, sorted."""


class TokenizedShardsSettings(Settings):
    """How clean text becomes packed rows of tokens."""

    sequence_length: int = Field(default=256, ge=16)
    """Tokens in a row, start and end tokens included; 256 keeps a step on two cores short."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """`concatenate` cuts documents at the row's end, without padding; `best_fit` keeps them whole
    where they fit, with a little padding."""
    mixing: dict[str, SourceMix] = Field(default_factory=dict)
    """Source name to how much of it is trained on; sources not named are taken once. What is left
    out is counted as `not_sampled`."""
    fraction: float = Field(default=1, gt=0, le=1)
    """Share of all training documents that is used, chosen by hash, for trying out on less."""
    decontamination: DecontaminationSettings = DecontaminationSettings()
    """Removal of training documents that overlap with held-out text."""
    start_token: str | None = None
    """Token put before each document; by default the family's own (see `tokenize.tokenizer`)."""
    end_token: str | None = None
    """Token put after each document; by default the family's own."""
    shard_bytes: int = Field(default=64 * 1024 * 1024, ge=4096, le=1024**3)
    """Size of a shard's tokens at full size; smaller corpora have one shard a split."""
    parity_sample: int = Field(default=200, ge=1)
    """Documents on which the fast tokenizer must agree with the Hugging Face one; asked again
    where they, the tokenizer or a library changed."""
    engine: Literal["auto", "gigatoken", "hugging_face"] = "auto"
    """Tokenizer engine; `auto` takes gigatoken where it agrees with Hugging Face on the sample."""

    examples: ExampleSettings = ExampleSettings()
    """How examples of a task become rows; for the recipes that learn from examples."""

    @model_validator(mode="after")
    def _shares_leave_room(self) -> "TokenizedShardsSettings":
        shares = [mix.share for mix in self.mixing.values() if mix.share is not None]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(f"the shares in `mixing` add up to {sum(shares):g}, more than 1")
        return self

    def row_tokens(self, form: Form) -> int:
        """Tokens in a row of a corpus of this form.

        A row holds one pair, one labeled text, or a prompt twice, once with each of its answers.
        """
        if form == "preferences":
            return 2 * self.sequence_length
        if form == "pairs":
            return self.examples.input_tokens + self.examples.target_tokens
        return self.examples.input_tokens + 1 if form == "labeled" else self.sequence_length

    def input_length(self, form: Form) -> int:
        """Most tokens that the model is given at once."""
        return self.examples.input_tokens if form in ("pairs", "labeled") else self.sequence_length

    def content(self) -> dict[str, Any]:
        """What decides the shards; both engines give the same tokens, so the engine is left out."""
        return self.model_dump(mode="json", exclude={"parity_sample", "engine"})
