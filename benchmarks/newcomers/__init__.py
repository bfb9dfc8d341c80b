"""Who comes after training: accuracy and cost beside training with everybody from the start."""
