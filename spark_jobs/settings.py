"""What the two Spark stages may be told."""

from typing import Any, Literal

from pydantic import Field, model_validator

from artifacts.settings import Settings


class NearDuplicateSettings(Settings):
    """How near-copies are found: MinHash candidates, verified by true Jaccard similarity."""

    enabled: bool = True
    """Whether near-copies are looked for at all; exact copies always are."""
    threshold: float = Field(default=0.8, gt=0.3, le=1)
    """Least Jaccard similarity of the word-shingle sets of two near-copies."""
    shingle_words: int = Field(default=5, ge=1)
    """Words in a shingle; 5 tells an edited copy from a text on the same subject."""
    permutations: int = Field(default=126, ge=16, le=1024)
    """Length of a MinHash signature; 126 find 99.8 % of the pairs at a threshold of 0.8."""


class CleanCorpusSettings(Settings):
    """How raw text becomes clean text."""

    unicode_form: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normalisation of the kept text; NFKC also replaces look-alikes such as ligatures."""
    minimum_characters: int = Field(default=100, ge=1)
    """Shorter documents are dropped, in characters after normalising; stubs teach little."""
    maximum_characters: int = Field(default=10_000_000, ge=1)
    """Longer documents are dropped, in characters; past ten million it is mostly a data dump."""
    near_duplicates: NearDuplicateSettings = NearDuplicateSettings()
    """Search for near-copies."""
    split_seed: int = 0
    """Draws which duplicate clusters are held out; another number draws another held-out set."""
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

    def content(self) -> dict[str, Any]:
        """What decides the clean corpus."""
        return self.model_dump(mode="json")

    def preparation(self) -> dict[str, Any]:
        """What decides how one document is prepared, apart from all others."""
        return self.model_dump(mode="json", exclude={"examples_per_reason": True})


class SplitSettings(Settings):
    """Shares of the duplicate clusters kept away from training."""

    validation: float = Field(default=0.05, gt=0, lt=1)
    """Share that training may look at to choose; 5 % is some hundred documents of a 10 MB text."""
    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Share that only the gate looks at."""

    @model_validator(mode="after")
    def _leaves_training_text(self) -> "SplitSettings":
        if self.validation + self.held_out >= 1:
            raise ValueError("validation and held_out together leave nothing to train on")
        return self


class TokenizedShardsSettings(Settings):
    """How clean text becomes packed rows of tokens."""

    sequence_length: int = Field(default=256, ge=16)
    """Tokens in a row, start and end tokens included; 256 keeps a step on two cores short."""
    split: SplitSettings = SplitSettings()
    """Shares of validation and held-out text."""
    packing: Literal["concatenate"] = "concatenate"
    """How documents fill rows: one after another, cut at a row's end and continued in the next."""
    start_token: str | None = None
    """Token put before each document; by default the family's own (see `spark_jobs.tokenizer`)."""
    end_token: str | None = None
    """Token put after each document; by default the family's own."""
    shard_bytes: int = Field(default=128 * 1024 * 1024, ge=4096)
    """Size of a shard's tokens at full size; smaller corpora have one shard a split."""
    parity_sample: int = Field(default=200, ge=1)
    """Documents on which the fast tokenizer must agree with the Hugging Face one in every run."""
    engine: Literal["auto", "gigatoken", "hugging_face"] = "auto"
    """Tokenizer engine; `auto` takes gigatoken where it agrees with Hugging Face on the sample."""

    def content(self) -> dict[str, Any]:
        """What decides the shards; both engines give the same tokens, so the engine is left out."""
        return self.model_dump(mode="json", exclude={"parity_sample", "engine"})
