"""Named errors. Each says what was given and what is allowed."""

from typing import TypeVar

E = TypeVar("E", bound=Exception)
# The words with which a client refuses a sum that the server relays to it
CHANGED_SUM = (
    "a relayed sum is not what its contributors have sent: this SuperNode takes no step with it"
)


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or impossible."""

    def __init__(self, words: str, *, key: str = "") -> None:
        super().__init__(words)
        self.key = key  # the setting that the words begin with, where they name one


class DataError(ValueError):
    """A data set that is missing, unreadable or unfit for training."""


class FractionalLabelsError(DataError):
    """Labels that are numbers to predict, not classes (``task: values``)."""


class OutputError(ValueError):
    """An output folder that exists, cannot be written or has no room."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or of another run."""


class FlowerVersionError(ImportError):
    """The installed Flower lacks a name that this package uses."""


class LegacyAppError(TypeError):
    """An app written for Flower's older interface; only the Message API is supported."""


class MalformedReplyError(ValueError):
    """A client's reply that cannot be used. The round leaves the client out."""


class NoClientsError(RuntimeError):
    """No client could be reached, or none gave a usable reply, before the deadline."""


class MembershipError(RuntimeError):
    """Not all SuperNodes can take part, and no list says which of them may."""


class ClientBugError(NoClientsError):
    """All clients fail with the same error.

    The message has a traceback where clients run on this machine, elsewhere the error's kind.
    """


class EngineFailedError(RuntimeError):
    """Flower's engine ended without a result; the message has the end of its log."""


class StateLostError(RuntimeError):
    """A client's state from earlier rounds is gone, or belongs to another round."""


class WorkerLostError(RuntimeError):
    """The process that keeps a SuperNode's clients died over a message, or did not start."""


class IdentityError(ValueError):
    """A party's key, registry or signed statement is unreadable, or is not what was granted."""


class DivergedError(RuntimeError):
    """The loss is no longer a number."""


class OutOfRangeError(ValueError):
    """A number is too large for the ring of a secure sum. The client does not send it."""


class UnreadableSumError(ValueError):
    """A sum that honest parts cannot have. The masks hide which part is wrong."""


class RefusedError(ValueError):
    """A client refuses a request, because it is wrong or its answer would reveal too much."""


class AlignmentError(RuntimeError):
    """The clients could not agree on one order of the identities that they share."""


def refuse_if(bad: object, why: str, error: type[Exception] = RefusedError) -> None:
    """Raise an error with these words if what was given is bad."""
    if bad:
        raise error(why)


def told(error: E, words: str) -> E:
    """Give an error words that may leave the machine: they quote nothing of it."""
    error.told = words  # type: ignore[attr-defined]
    return error


# What others say, in a log or a report

MAX_REASON = 300  # characters of a peer's own words that reach a log or a report
LOOKED_AT = 1 << 16  # characters of a peer's text that are looked at: it may have 50 million


def one_line(said: object, limit: int = MAX_REASON) -> str:
    """Cut a peer's words to one short printable line, so that they cannot break a log."""
    # Of a long text the last line is kept: Ray sends whole tracebacks, which end with the error.
    text = said if isinstance(said, str) else brief(said, limit)
    if len(text) > limit:
        text = text[-LOOKED_AT:].rstrip().rpartition("\n")[2]
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def printable(text: str) -> str:
    """Replace each character that a terminal would obey by a question mark."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)


def brief(value: object, limit: int = 60) -> str:
    """Return the beginning of ``repr(value)`` without building the rest: a peer can send 60 MiB."""
    if isinstance(value, (str, bytes, bytearray)):
        text = repr(value[:limit])
    elif isinstance(value, (list, tuple, dict)):
        ends = {list: "[]", tuple: "()"}.get(type(value), "{}")
        text = ends[0]
        for number, one in enumerate(value):
            shown = f"{brief(one, limit)}: " if isinstance(value, dict) else ""
            shown += brief(value[one] if isinstance(value, dict) else one, limit)
            text += f", {shown}" if number else shown
            if len(text) > limit:
                break
        text += ends[1]
    elif isinstance(value, int) and value.bit_length() > 4 * limit:
        text = f"a number of {value.bit_length()} bits"  # Python writes no number of 4,300 digits
    else:
        text = repr(value)
    return text[:limit]


def words_of(error: BaseException) -> str:
    """Return an error's message. If it may quote a peer at length, return only its beginning."""
    large = (one for one in error.args if isinstance(one, (str, bytes)) and len(one) > LOOKED_AT)
    return str(error) if (one := next(large, None)) is None else brief(one, MAX_REASON)
