"""Stands in for the verifier."""

import fake_service

fake_service.main("verifier")
