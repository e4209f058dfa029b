"""The systems that the control-plane benchmark compares."""
