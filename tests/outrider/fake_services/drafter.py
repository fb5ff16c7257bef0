"""Stands in for the drafter."""

import fake_service

fake_service.main("drafter")
