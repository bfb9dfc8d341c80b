"""What a run leaves to use: predictions, models, figures by client; and how they are read."""
