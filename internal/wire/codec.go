package wire

import (
	"encoding/binary"
	"fmt"
	"strings"
)

func appendBytes[T string | []byte](dst []byte, b T) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(b)))
	return append(dst, b...)
}

func cut(s string, limit int) string {
	if len(s) > limit {
		return strings.ToValidUTF8(s[:limit], "") // not half a character
	}
	return s
}

func appendBool(dst []byte, b bool) []byte {
	if b {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// decoder reads a message front to back. After the first error every read
// returns zero, so a message is decoded without a check at each field.
type decoder struct {
	what string
	src  []byte
	err  error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s: %s", ErrPayload, d.what, fmt.Sprintf(format, args...))
	}
	d.src = nil
}

// take returns the next n bytes, or nil when there are fewer.
func (d *decoder) take(n int) []byte {
	if d.err != nil {
		return nil
	}
	if len(d.src) < n {
		d.fail("ends %d bytes too early", n-len(d.src))
		return nil
	}
	b := d.src[:n]
	d.src = d.src[n:]
	return b
}

func (d *decoder) uint8() uint8 {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) bool() bool {
	v := d.uint8()
	if v > 1 {
		d.fail("a flag is %d, want 0 or 1", v)
	}
	return v == 1
}

func (d *decoder) uint16() uint16 {
	if b := d.take(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) uint32() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) uint64() uint64 {
	if b := d.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// count reads a number of elements that take at least size bytes each, so a
// few bytes can't make the caller allocate for many elements.
func (d *decoder) count(name string, limit, size int) int {
	n := d.uint32()
	if uint64(n) > uint64(limit) {
		d.fail("%s: %d, at most %d are allowed", name, n, limit)
		return 0
	}
	if int(n)*size > len(d.src) {
		d.fail("%s: %d of them don't fit in %d bytes", name, n, len(d.src))
		return 0
	}
	return int(n)
}

func (d *decoder) bytes(name string, limit int) []byte {
	return d.take(d.count(name, limit, 1))
}

func (d *decoder) string(name string, limit int) string {
	return string(d.bytes(name, limit))
}

// end returns the first error; bytes that are left over are one.
func (d *decoder) end() error {
	if d.err == nil && len(d.src) > 0 {
		d.fail("%d bytes too many", len(d.src))
	}
	return d.err
}
