"""The class that Lightning calls. It does no arithmetic."""
