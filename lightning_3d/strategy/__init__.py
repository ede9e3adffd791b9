"""The class that Lightning calls. It holds no arithmetic."""
