"""Models, phases and exports behind `python -m models.train`."""
