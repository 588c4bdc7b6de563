"""Errors that a user can act on."""


class UserError(Exception):
    """A fault in what the user gave: a setting, a file, a missing input.

    The message names the file, key or row, says what was expected and what to do next. Entry points
    print it alone, without a traceback.
    """


class MissingArtifact(UserError):
    """An input artifact does not exist yet."""


class DamagedArtifact(UserError):
    """A file of an artifact has another size or checksum than its manifest says."""
