"""Keeps retired words out of the code, the settings and the docs: one word for one thing.

python scripts/check_vocabulary.py
"""

import re
import subprocess
import sys
from pathlib import Path

RETIRED = {
    r"(?<![a-z])(token|normal|initial|organ|recogn|optim|serial|summar|quant|material|general|"
    r"local|real|minim|maxim|final|util|categor|parallel|synchron|author|custom|emphas|priorit|vector|"
    r"random)"
    r"is(e|es|ed|er|ers|ing|ation|ations)\b": "American spelling: -ize, -ization",
    r"\blicences?\b": "license",
    r"\b(behaviour|colour|favour|neighbour|honour)\w*": "American spelling: -or",
    r"\banew\b": "again, rebuilt",
    r"\bpatien(ce|tly)\b": "timeout, with retries",
    r"\brecompute_activations\b": "activation_checkpointing",
    r"\bword[ _]runs?\b": "n-grams",
    r"\bquiz\b": "multiple-choice set",
    r"\bjudg(e|es|ed|ing)? text\b": "reference text",
    r"\b(tokens|rows) a (second|step)\b": "tokens per second, rows per step",
    r"\btasks a core\b": "tasks per core",
    r"\bfit to be learnt from\b": "usable",
}
"""Pattern, ignoring case, to the word in its place."""

CHECKED = (".py", ".md", ".yaml", ".toml", ".sh")
SELF = "scripts/check_vocabulary.py"


def main() -> int:
    """Print every retired word with its place; returns 1 where there is one."""
    patterns = [(re.compile(pattern, re.IGNORECASE), word) for pattern, word in RETIRED.items()]
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    found = 0
    for name in listed.stdout.splitlines():
        if not name.endswith(CHECKED) or name == SELF or not Path(name).exists():
            continue
        for number, line in enumerate(Path(name).read_text().splitlines(), 1):
            for pattern, word in patterns:
                for match in pattern.finditer(line):
                    print(f"{name}:{number}: {match.group(0)!r}: {word}")
                    found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
