package lab

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Rate is a link's rate in bits a second. 0 means that the link is not shaped.
type Rate uint64

// What tbf and the kernel's timers can do without turning the figures into fiction.
const (
	MinRate Rate = 1e6
	MaxRate Rate = 25e9
)

var rateUnits = []struct {
	suffix string
	bits   float64
}{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}}

const rateAllowed = "want a number with kbit, mbit or gbit, such as 200mbit, 1gbit or 2.5gbit, from 1mbit to 25gbit, or none"

// ParseRate reads rates such as 200mbit, 2.5gbit and none (or 0): decimal units, in either case.
func ParseRate(text string) (Rate, error) {
	t := strings.ToLower(strings.TrimSpace(text))
	if t == "none" || t == "0" {
		return 0, nil
	}
	for _, u := range rateUnits {
		number, found := strings.CutSuffix(t, u.suffix)
		if !found {
			continue
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		bits := math.Round(value * u.bits)
		if err != nil || !(bits >= float64(MinRate)) || bits > float64(MaxRate) {
			break
		}
		return Rate(bits), nil
	}
	return 0, fmt.Errorf("rate is %q: %s", text, rateAllowed)
}

// String is the shortest form that ParseRate reads back as the same rate.
func (r Rate) String() string {
	if r == 0 {
		return "none"
	}
	for _, u := range rateUnits {
		if value := float64(r) / u.bits; value >= 1 {
			return strconv.FormatFloat(value, 'f', -1, 64) + u.suffix
		}
	}
	return strconv.FormatFloat(float64(r)/1e3, 'f', -1, 64) + "kbit"
}

// BytesPerSecond is the rate in the unit of everything else.
func (r Rate) BytesPerSecond() float64 { return float64(r) / 8 }

// burst is tbf's bucket in bytes, queue its queue: see the package comment.
func (r Rate) burst() uint32 { return uint32(max(32<<10, r.BytesPerSecond()*1.7e-3)) }
func (r Rate) queue() uint32 { return r.burst() + uint32(max(256<<10, r.BytesPerSecond()*20e-3)) }
