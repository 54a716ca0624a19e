"""What optimizers keep: types, storage, slots by name, averages, shardings."""
