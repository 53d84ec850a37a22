package control

import "sync"

// mailboxLimit is how many events may wait before a reader stops reading, so
// that a handler that can't keep up slows the leader down instead of filling
// the memory.
const mailboxLimit = 1 << 16

// mailbox is the queue of events in front of Handle.
type mailbox struct {
	mu     sync.Mutex
	events []Event
	head   int
	closed bool
	wake   chan struct{} // capacity 1: there are events
	space  chan struct{} // capacity 1: there is room again
}

func newMailbox() *mailbox {
	return &mailbox{wake: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// put appends an event, whatever the limit: for events of this rank's own
// making, which are few. After close it drops it.
func (m *mailbox) put(e Event) {
	m.mu.Lock()
	if !m.closed {
		m.events = append(m.events, e)
	}
	m.mu.Unlock()
	signal(m.wake)
}

// waitForSpace returns when there are fewer events than the limit, or when
// done is closed.
func (m *mailbox) waitForSpace(done <-chan struct{}) {
	for waited := false; ; waited = true {
		m.mu.Lock()
		full := !m.closed && len(m.events)-m.head >= mailboxLimit
		m.mu.Unlock()
		if !full {
			if waited {
				signal(m.space) // for the next who waits; one too many is harmless
			}
			return
		}
		select {
		case <-m.space:
		case <-done:
			return
		}
	}
}

// take returns the next event; false: there is none now.
func (m *mailbox) take() (Event, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || m.head == len(m.events) {
		return nil, false
	}
	e := m.events[m.head]
	m.events[m.head] = nil
	m.head++
	switch {
	case m.head == len(m.events):
		m.events, m.head = m.events[:0], 0
	case m.head >= mailboxLimit:
		// The live part is moved once for this many events.
		m.events = append(m.events[:0], m.events[m.head:]...)
		m.head = 0
	}
	if len(m.events)-m.head == mailboxLimit-1 {
		signal(m.space)
	}
	return e, true
}

// close drops what waits and what is put later.
func (m *mailbox) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.events, m.head = nil, 0
	signal(m.space)
}
