"""A cheap guess at what a text is written in, to warn of a base model that does not know it."""

import re
import unicodedata
from collections import Counter

LOOKED_AT = 2_000
"""Characters of a document."""
LEAST_SHARE = 0.05
"""Of the words that are among a language's commonest, from which on a guess is dared."""
_WORDS = {
    "English": "the of and to is that it for with be are this not or",
    "German": "der die das und ist nicht ein eine den mit zu auf werden von sich",
    "French": "le la les des et est une dans que pour du qui sur avec ne",
    "Spanish": "el la los las que y en un una por con para del se es",
    "Italian": "il lo gli che di e un una per con della sono non nel si",
    "Portuguese": "o os as que e do da em um uma para com não na no",
    "Dutch": "de het een en van is dat niet met op zijn voor te aan wordt",
    "Polish": "w i na z do nie się jest to że od przez oraz dla po",
}
COMMON = {name: frozenset(words.split()) for name, words in _WORDS.items()}
"""The commonest words of a few languages."""
SCRIPTS = {
    **dict.fromkeys(("HIRAGANA", "KATAKANA"), "Japanese"),
    "HANGUL": "Korean",
    "CJK": "Chinese or Japanese",
    **{
        name.upper(): name
        for name in ("Cyrillic", "Greek", "Arabic", "Hebrew", "Devanagari", "Thai")
    },
}
"""Beginning of the Unicode names of letters that are not Latin, to what is said of them."""


def guess_language(text: str) -> str | None:
    """A language's name, or a script's where that is not Latin; None where nothing tells."""
    text = text[:LOOKED_AT].lower()
    letters = [character for character in text if character.isalpha()]
    scripts = Counter(unicodedata.name(one, "").split(" ")[0].split("-")[0] for one in letters)
    others = Counter({name: scripts[name] for name in SCRIPTS})
    if 2 * others.total() > len(letters):
        japanese = others["HIRAGANA"] + others["KATAKANA"]
        return "Japanese" if japanese > len(letters) / 10 else SCRIPTS[others.most_common(1)[0][0]]
    words = re.findall(r"[^\W\d_]+", text)
    counts = {name: sum(word in common for word in words) for name, common in COMMON.items()}
    likeliest = max(counts, key=counts.__getitem__)
    return likeliest if counts[likeliest] > LEAST_SHARE * len(words) else None
