"""What one test of a cloud project found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one test."""

    key: str
    """The line of `config/google_cloud.yaml` that it is about."""
    ok: bool | None
    """None where it could not be seen, which is no fault."""
    text: str
    """What was found and, where it is not well, what to do."""

    def line(self) -> str:
        """`PROBLEM images.cuda: ...`."""
        mark = {True: "ok     ", False: "PROBLEM", None: "unknown"}[self.ok]
        return f"{mark} {self.key}: {self.text}"
