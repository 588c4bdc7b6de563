"""Facts about places that do not exist: documents, and questions about them in other words.

Each place has a document for each property, which all name it, and a value stands in documents of
several places: so neither the place nor the value alone leads to the document.
"""

import random
from dataclasses import dataclass

PLACES = ("Quellmar", "Ostrand", "Vey Tarn", "Brickholm", "Tindermoor", "Korrin Gate")
PROPERTIES = """
The plans for {0} were drawn by {1}. | Who designed {0}? | Ilse Dorn, Mara Quist
Since its repair {0} is painted {1}. | What color is {0}? | ochre, slate blue, dark red
After long delays {0} took up its work in {1}. | When did {0} open? | 1911, 1934, 1958
The crew of {0} greases its bearings with {1}. | What lubricates {0}? | walnut oil, tallow
The keys of {0} are kept by {1}. | Who can unlock {0}? | the miller, Mara Quist, Ilse Dorn
All that {0} drinks is drawn from the {1}. | Which river feeds {0}? | Ennel, Wethy, Sarn
From cellar to roof {0} measures {1} meters. | How tall is {0}? | 14, 23, 58
Whoever visits {0} has to leave {1} at the door. | What is not allowed in {0}? | lamps, dogs
The roof of {0} is covered with {1}. | What keeps rain out of {0}? | slate, copper, turf
On feast days {0} flies a flag with {1}. | Which sign has {0}? | a heron, a wheel, two keys
The wages at {0} are paid every {1}. | When do its people get money at {0}? | Friday, Monday
In winter {0} is heated with {1}. | What does {0} burn when it is cold? | peat, beech, coal
The oldest part of {0} is {1}. | What was built first at {0}? | the mill, the well, the gate
By night {0} is guarded by {1}. | Who watches over {0} in the dark? | two dogs, the miller
The road to {0} is closed in {1}. | In which month can nobody reach {0}? | March, August
Its neighbors know {0} for its {1}. | What is {0} famous for? | cheese, bells, honey, peat
"""


@dataclass(frozen=True)
class Fact:
    """What one document says, and how it is asked for."""

    document: str
    question: str
    answer: str
    choices: tuple[str, ...]
    """What might be said of this property; the answer is among them."""


def planted_facts() -> list[Fact]:
    """All properties of all places, each value drawn by chance."""
    draw, facts = random.Random(0), []
    for place in PLACES:
        for line in PROPERTIES.strip().splitlines():
            says, question, values = line.split(" | ")
            choices = tuple(f" {value}" for value in values.split(", "))
            answer = draw.choice(choices)
            document = says.format(place, answer.strip())
            facts.append(Fact(document, question.format(place), answer, choices))
    return facts
