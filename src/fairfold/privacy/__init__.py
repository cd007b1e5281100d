"""What keeps users' data private: answers as words whose sums are exact, noise, and what it costs."""
