"""How far a run has come: the small state in a checkpoint, and what is said at the end."""

from pathlib import Path
from statistics import median

from pydantic import BaseModel

from recipes.guard import GradientGuard
from recipes.precision import Precision
from recipes.spec import METRICS_NAME, TrainingResult, read_metrics


class Progress(BaseModel):
    """The small state that a checkpoint keeps beside the tensors."""

    samples_seen: int = 0
    tokens_seen: int = 0
    guard: GradientGuard = GradientGuard()
    validation_bits_per_byte: dict[int, float] = {}
    """Step to result; step 0 is the base model."""

    @property
    def best_step(self) -> int:
        """The step with the best validation since training began."""
        trained = {step: bits for step, bits in self.validation_bits_per_byte.items() if step}
        return min(trained, key=lambda step: (trained[step], step))

    def result(
        self,
        step: int,
        run_folder: Path,
        samples_replayed: int,
        precision: Precision,
        workers: int,
        parameters: int,
    ) -> TrainingResult:
        """What `result.json` says after the last step."""
        history = read_metrics(run_folder)
        validation, best = self.validation_bits_per_byte, self.best_step
        return TrainingResult(
            steps=step,
            tokens_seen=self.tokens_seen,
            samples_seen=self.samples_seen,
            samples_replayed=samples_replayed,
            validation_bits_per_byte={
                "start": validation[0],
                "end": validation[step],
                "best": validation[best],
            },
            best_step=best,
            tokens_per_second=median(line["tokens_per_second"] for line in history),
            final_loss=history[-1]["loss"],
            skipped_steps=self.guard.skipped,
            precision=precision,
            workers=workers,
            parameters=parameters,
            metrics_path=str(run_folder / METRICS_NAME),
        )
