"""Commands about text: from an answer to its rows, what was dropped, what is to be forgotten."""
