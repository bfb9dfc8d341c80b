"""One file or folder for each paper, with both halves of its algorithm."""

# ruff: noqa: F403  each folder says what it exports

from typing import TYPE_CHECKING

from flower_graph.lazy import attach

if TYPE_CHECKING:
    from flower_graph.strategies.fed_gta import FedGTA as FedGTA
    from flower_graph.strategies.fed_gta import FedGTAClient as FedGTAClient
    from flower_graph.strategies.fed_gta import FedGTASection as FedGTASection
    from flower_graph.strategies.fed_pub import FedPUB as FedPUB
    from flower_graph.strategies.fed_pub import FedPUBClient as FedPUBClient
    from flower_graph.strategies.fed_pub import FedPUBSection as FedPUBSection
    from flower_graph.strategies.fed_sage import *
    from flower_graph.strategies.fedgls import *
    from flower_graph.strategies.fedscem import *
    from flower_graph.strategies.nfedgnn import *
    from flower_graph.strategies.ppfl import *
    from flower_graph.strategies.secure_average import SecureAverage as SecureAverage
    from flower_graph.strategies.secure_average import secure_average_mod as secure_average_mod

__getattr__ = attach(__name__)
