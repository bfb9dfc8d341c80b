"""The ClientApp of every method, which Flower loads anew for each message; it imports little."""

from flower_graph.client.resident.app import ResidentClientApp

CLIENTS = "flower_graph.apps.configured_client:app"  # what answers, where the clients live
app = ResidentClientApp(CLIENTS)
