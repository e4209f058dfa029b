"""Parts of `rd2h probe`: the stand-alone check of registration and reads between two endpoints."""
