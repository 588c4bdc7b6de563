"""What the Spark stages may be told."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from artifacts.examples import Form
from artifacts.settings import Settings

COPIED_BY_PROCESS = 4_000
"""Default maximum of megabytes in buckets that one process copies: some two minutes."""

DOCUMENTS_IN_MEMORY = 4_000_000
"""Default maximum of documents that are decided in the driver's memory: about 4 GB."""

HELD_OUT_IN_MEMORY = 500
"""Default maximum of megabytes of held-out text whose n-grams every task holds: 2.5 GB."""


class NearDuplicateSettings(Settings):
    """How near-copies are found: MinHash candidates, verified by true Jaccard similarity."""

    enabled: bool = True
    """Whether to search for near-copies, and for versions of a document, which share less but stay
    in one split; exact copies are always searched for."""
    threshold: float = Field(default=0.8, gt=0.3, le=1)
    """Minimum Jaccard similarity of the word-shingle sets of two near-copies."""
    shingle_words: int = Field(default=5, ge=1)
    """Words per shingle; 5 distinguishes an edited copy from another text on the same subject. In
    scripts written without spaces between words, each character counts as a word."""
    permutations: int = Field(default=126, ge=16, le=1024)
    """Length of a MinHash signature. With 126 and a threshold of 0.8, 99.8% of the pairs whose
    similarity is 0.8 become candidates, and more of those above."""


Probability = Annotated[float, Field(ge=0, le=1)]
QualityFilter = Literal["gopher_quality", "gopher_repetition", "c4", "fineweb"]


class DecontaminationSettings(Settings):
    """How text that is used for evaluation is kept out of training."""

    ngram_size: int = Field(default=13, ge=5)
    """Words per n-gram; 13 consecutive words hardly ever match by chance. In scripts written
    without spaces between words, each character counts as a word."""
    maximum_overlap: float = Field(default=0.5, ge=0, le=1)
    """Maximum share of a document's n-grams that may appear in evaluation text, and of a single
    evaluation text's n-grams that may appear in the document; a share is of at least 8, or of all
    that a text has. Boilerplate, which held-out text of three or more duplicate clusters contains,
    evaluation files of your own aside, does not count. Overlaps below 0.5 are mostly set phrases
    and parameter lists. 1 turns the check off, except for text to replay."""


class ClassifierSettings(Settings):
    """A fastText model of your own that labels documents by language, quality or subject."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the column for the most likely label; its probability is in the column
    `<name>_score`."""
    model: str
    """The model, a `.bin` or `.ftz` file written by `fasttext supervised`."""
    keep: dict[str, Probability] = Field(default_factory=dict)
    """Maps a label, without `__label__`, to a minimum probability; documents that reach none of
    them are dropped."""
    drop: dict[str, Probability] = Field(default_factory=dict)
    """Maps a label to the probability at or above which documents are dropped; use it instead of
    `keep`. With neither, documents are only labeled."""

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
    """What happens to texts that differ only in figures, dates and ids, that is, in words with a
    digit and in the English names of months and weekdays."""

    keep: int | None = Field(default=5, ge=1)
    """Maximum number of texts to keep per template; the others are dropped as `template`. Texts of
    earlier corpora count first and are never dropped for their number. `null` sets no limit. In
    either case, the texts of a template are all in the same split."""
    same_share: float = Field(default=0.5, gt=0, le=1)
    """Minimum share of a text's bytes that does not differ. Below it, as in tables, the figures
    count as the content. 1 turns the search for templates off."""


class SplitSettings(Settings):
    """How new text is divided, by duplicate clusters: each is a document with its copies,
    near-copies and versions, if there are any.

    Text that a model was trained on never becomes validation or held-out text later, nor the
    reverse, whatever changes here.
    """

    validation: float = Field(default=0.05, gt=0, lt=1)
    """Share of the duplicate clusters used for validation, that is, to choose between checkpoints
    or settings."""
    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Share of the duplicate clusters held out for the gate's evaluation; nothing is trained or
    tuned on them."""
    seed: int = 0
    """Seed that determines the split of each new duplicate cluster."""
    sources: dict[str, Literal["train", "validation", "held_out", "replay"]] = Field(
        default_factory=dict
    )
    """Maps a source to the split for all its text, such as `held_out` for evaluation files of your
    own; their near-copies are kept out of training, too. Other new text is trained on if it is a
    near-copy of text assigned to `train`, where plain text may also stand beside conversations: all
    of it is learned. `replay` is general text that training replays at
    `checkpoint.replay_share`; a replay document that is a near-copy of another source's text, or
    shares even one n-gram with evaluation text, is left out. Texts of one template count as
    near-copies here."""

    @model_validator(mode="after")
    def _leaves_training_text(self) -> "SplitSettings":
        if self.validation + self.held_out >= 1:
            raise ValueError("validation and held_out must add up to less than 1")
        return self

    @property
    def replayed(self) -> list[str]:
        """The sources to replay."""
        return [name for name, split in self.sources.items() if split == "replay"]


class CleanCorpusSettings(Settings):
    """How raw text becomes clean text."""

    repair_encodings: bool = True
    """Repair wrongly decoded lines (`cafÃ©`) with ftfy."""
    unicode_form: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normalization of the kept text; NFKC also replaces compatibility characters such as
    ligatures."""
    minimum_characters: int = Field(default=100, ge=1)
    """Minimum length of a plain-text document, in characters after normalization; shorter ones are
    dropped, since stubs teach little."""
    maximum_characters: int = Field(default=10_000_000, ge=1)
    """Maximum length of a plain-text document, in characters; longer ones are dropped, since beyond
    ten million most are data dumps."""
    mask_personal_data: bool = False
    """Replace e-mail addresses and public IPv4 and IPv6 addresses with placeholders; a version
    number of four parts looks like an address. Off by default, since manuals often need theirs."""
    quality_filters: list[QualityFilter] = Field(default_factory=list)
    """Filters for English web text, applied in the order given; technical text fails many of
    them."""
    classifiers: list[ClassifierSettings] = Field(default_factory=list)
    """Models that label documents, applied in the order given after the quality filters. A document
    that is dropped is not passed to the next ones."""
    near_duplicates: NearDuplicateSettings = NearDuplicateSettings()
    """Search for near-copies."""
    templates: TemplateSettings = TemplateSettings()
    """Search for texts made from the same template; task examples are never counted as such."""
    decontamination: DecontaminationSettings = DecontaminationSettings()
    """Removal of documents that overlap with the general English text of the evaluation."""
    split: SplitSettings = SplitSettings()
    """How new text is divided into training, validation and held-out text."""

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
        names = [classifier.name for classifier in self.classifiers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two classifiers have the name {name}; each needs its own")
        return self

    def content(self) -> dict[str, Any]:
        """What decides the clean corpus, except the content of the classifiers' models."""
        # A model is identified by its content, not by its path (`classify.check_models`).
        content = self.model_dump(mode="json", exclude={"classifiers": {"__all__": {"model"}}})
        # No longer a setting, but part of the identity of every clean corpus in a store: without
        # it, all of them, and what follows from them, would be built again.
        return content | {"repeated_spans": {"action": "ignore", "minimum_words": 50}}

    def preparation(self) -> dict[str, Any]:
        """The settings that decide how a document is prepared, apart from all others."""
        apart = {"repeated_spans", "split"}
        return {key: value for key, value in self.content().items() if key not in apart}


MAXIMUM_WEIGHT = 100.0
"""Maximum times that a source may be seen; more would teach it by heart."""


class SourceMix(Settings):
    """How much of one source is trained on; validation and held-out text are never sampled.

    Set at most one of these. Documents are chosen by hashes of their ids.
    """

    weight: float = Field(default=1, ge=0, le=MAXIMUM_WEIGHT)
    """How many times the source is seen: 0.5 takes about half of its documents, 2 takes each one
    twice, 0 takes none."""
    token_budget: int | None = Field(default=None, ge=1)
    """Approximate number of tokens to take, repeating the source as often as needed, but at most
    100 times."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Approximate share of the training tokens, replayed text not counted, to take from the source,
    repeating it as often as needed, but at most 100 times."""
    documents: int | None = Field(default=None, ge=1)
    """Approximate maximum number of documents to take."""
    bytes: int | None = Field(default=None, ge=1)
    """Approximate maximum number of bytes of text to take."""

    @model_validator(mode="after")
    def _one_of_all(self) -> "SourceMix":
        fields_set = [name for name in type(self).model_fields if getattr(self, name) is not None]
        # `weight` always has a value; the default does not count as given.
        if len(fields_set) - (self.weight == 1) > 1:
            fields_set = [name for name in fields_set if name != "weight" or self.weight != 1]
            raise ValueError(f"give one of {' and '.join(fields_set)}, not several")
        return self


class ExampleSettings(Settings):
    """How task examples become rows; these settings do not apply to plain text."""

    template: Literal["chat", "plain"] = "chat"
    """How conversations and preferences are written: with the base model's chat template (`chat`),
    or as each prompt, a newline and its answer (`plain`)."""
    chat_template: str | None = None
    """A chat template, as Jinja text, to use instead of the base model's; the trained model keeps
    it."""
    input_tokens: int = Field(default=256, ge=4)
    """Maximum number of tokens in a pair's input or in a labeled text."""
    target_tokens: int = Field(default=30, ge=2)
    """Maximum number of tokens in a pair's target, including its end token."""
    input_prefix: str = ""
    """Text to put before a pair's input, such as T5's `summarize: `. The endpoint's `/predict` puts
    it before its inputs; in a completion request, the prompt must already contain it."""
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    """What happens to examples that are too long: they are cut, dropped, or fail the run
    (`refuse`). Those that are cut or dropped are counted."""
    labels: tuple[str, ...] = ()
    """The classes in the order of their ids; by default, those that occur, sorted, without those of
    which nothing can be learned. If they are listed, the run fails where examples have another
    class, or where one of these cannot be learned."""


class TokenizedShardsSettings(Settings):
    """How clean text becomes packed rows of tokens."""

    sequence_length: int = Field(default=256, ge=16)
    """Tokens per row, including start and end tokens; 256 keeps a step on two cores short. For
    preferences, it limits the prompt together with each answer; for pairs and labeled texts,
    `examples.input_tokens` and `examples.target_tokens` apply instead."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How plain text fills rows: `concatenate` continues a document in the next row and pads only
    the last row; `best_fit` keeps documents whole if they fit, with a little padding."""
    mixing: dict[str, SourceMix] = Field(default_factory=dict)
    """Maps a source (`study` for derived text) to how much of it is trained on; sources that are
    not named are taken once. What is left out is counted as `not_sampled`."""
    fraction: float = Field(default=1, gt=0, le=1)
    """Share of all training documents to use, chosen by hash, for trials on less text; the amounts
    in `mixing` shrink with it."""
    decontamination: DecontaminationSettings = DecontaminationSettings()
    """Removal of training, validation and replay documents that overlap with held-out text."""
    start_token: str | None = None
    """Special token to put before each document of plain text. By default, the base model's BOS
    token if that marks the start of a text, such as `<s>`, otherwise its document separator."""
    end_token: str | None = None
    """Special token to put after each document of plain text and, without a chat template, after
    each answer or target. By default, the base model's document separator, such as `</s>`; if it
    has none, its EOS token."""
    shard_bytes: int = Field(default=64 * 1024 * 1024, ge=4096, le=1024**3)
    """Target size of a shard's tokens, in bytes; small corpora have one shard per split."""
    engine: Literal["auto", "gigatoken", "hugging_face"] = "auto"
    """Tokenizer engine; if gigatoken does not agree with Hugging Face on the sample, `auto` uses
    Hugging Face, and `gigatoken` fails the run."""

    examples: ExampleSettings = ExampleSettings()
    """How task examples become rows, for the recipes that learn from examples."""

    @model_validator(mode="after")
    def _shares_leave_room(self) -> "TokenizedShardsSettings":
        shares = [mix.share for mix in self.mixing.values() if mix.share is not None]
        # With room for rounding: shares such as 0.1 are not exact.
        if sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"the shares in `mixing` add up to {sum(shares):g}, more than 1; lower them"
            )
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
        return self.model_dump(mode="json", exclude={"engine"})
