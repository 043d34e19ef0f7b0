"""The app of the server: training, the conversation that calibrates the model, and final scores."""

from unskew.flower import server_app

app = server_app()
