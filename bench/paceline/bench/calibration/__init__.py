"""Calibrating drafters' confidences by recorded rounds, and how right they are."""
