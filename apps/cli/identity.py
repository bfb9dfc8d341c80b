"""The commands ``flower-graph identity`` and ``registry``: the SuperNodes of secure sums."""

import argparse

from flower_graph.apps.cli.say import say
from flower_graph.errors import ConfigError
from flower_graph.secure.node_config import FEWEST_PARTIES
from flower_graph.secure.parties.registry import (
    Registry,
    new_identity,
    public_file,
    read_numbers,
    read_public,
    write_numbers,
)


def identity_command(args: argparse.Namespace) -> int:
    """Make a key pair and print where it is."""
    public = new_identity(args.file)
    say(
        f"secret key  {args.file}: show it to nobody",
        f"public key  {public_file(args.file)}: {public.hex()}",
    )
    return 0


def registry_command(args: argparse.Namespace) -> int:
    """Show a registry, or write a new version of it."""
    path = args.registry
    if args.action == "add":
        most, is_new = args.most_clients, not path.exists()
        if is_new and most is None:
            raise ConfigError(
                f"registry {path}: is not there; for a new one give --most-clients, the most "
                "clients that any SuperNode is granted"
            )
        registry = Registry({}, most) if is_new else Registry.read(path)
        if most not in (None, registry.most_clients):
            words = f"the registry has {registry.most_clients}, which stays"
            raise ConfigError(f"--most-clients {most}: {words}")
        registry = registry.with_party(read_public(args.key), read_numbers(args.clients))
    else:
        registry = Registry.read(path)
        if args.action == "rotate":
            registry = registry.rotated(args.party, read_public(args.key))
        elif args.action == "revoke":
            registry = registry.without(args.party)
    if args.action != "show":
        registry.write(path)
    parties, active = registry.parties.values(), len(registry.active)
    few = "" if active >= FEWEST_PARTIES else f"; secure sums need at least {FEWEST_PARTIES}"
    say(
        f"{len(parties)} SuperNode{'s' * (len(parties) != 1)}, {active} active{few}; at most "
        f"{registry.most_clients} client{'s' * (registry.most_clients != 1)} each",
        f"SHA-256 {registry.digest.hex()}",
        *(
            f"{party.number:5}  {party.key.hex()}  clients {write_numbers(party.clients)}"
            + (f"  former keys: {len(party.former)}" if party.former else "")
            + ("  REVOKED" if party.revoked else "")
            for party in parties
        ),
    )
    if args.action != "show":
        say("copy this file to all SuperNodes: those with different versions refuse each other")
    return 0
