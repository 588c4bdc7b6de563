"""How sure a measurement is."""
