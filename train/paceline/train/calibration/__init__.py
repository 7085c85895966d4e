"""Sequential temperature scaling of drafters' confidences (`paceline calibrate`)."""
