"""The methods, by the name that the run config gives them."""

from flwr.app import Context

from with_flower_graph import fedgls, fedscem, nfedgnn, ppfl

METHODS = {"fedgls": fedgls, "fedscem": fedscem, "nfedgnn": nfedgnn, "ppfl": ppfl}


def chosen(context: Context):
    """Return the method's module: its server's half ``strategy``, its clients' half ``client``."""
    name = context.run_config["method"]
    if name not in METHODS:
        raise ValueError(f"method={name!r}: must be one of {', '.join(METHODS)}")
    return METHODS[name]
