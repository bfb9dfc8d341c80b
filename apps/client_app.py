"""The ClientApp of every method, which Flower loads anew for each message; it imports little."""

from flower_graph.client.resident.app import ResidentClientApp

app = ResidentClientApp("flower_graph.apps.configured_client:app")
