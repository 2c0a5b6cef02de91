"""The web page at `/`: a chat, the plan, and the status, in one HTML document."""
