"""The ClientApp of every method. Flower loads it anew for each message, so it imports little."""

from flower_graph.client.resident import ResidentClientApp

CLIENTS = "flower_graph.apps.configured_client:app"  # what answers, where the clients live
app = ResidentClientApp(CLIENTS)
