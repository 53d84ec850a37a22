// Package model describes what is known of a training job before it runs: the tensors of a model in
// forward order, how long each layer computes, and T*, the time below which no schedule can bring a step.
//
// Profiles are values that nothing changes after they are made; every function here may be called
// concurrently.
package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
)

// Format is the only value of Profile.Format that this version reads and writes.
const Format = "autobyte-profile/1"

// Kind says how a figure came about.
type Kind string

const (
	// Measured: taken on the device that the profile names, by whoever made the profile.
	Measured Kind = "measured"
	// Published: taken by others and published; the source says where.
	Published Kind = "published"
	// Estimated: derived from other figures by a rule that the source states.
	Estimated Kind = "estimated"
)

var kinds = []Kind{Measured, Published, Estimated}

// Figures names the groups of figures in a profile. Each needs exactly one source.
var figures = []string{"tensors", "forward_s", "backward_s"}

// dtypeBytes holds the dtypes a profile may name, as torch spells them, with the bytes of one element.
var dtypeBytes = map[string]int64{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

// Profile is one model at one batch size on one device. Its JSON is what Load reads and Save writes:
//
//	{
//	  "format": "autobyte-profile/1",
//	  "name": "resnet50",            what the command line calls it
//	  "batch": 32,                   samples of one worker in one step
//	  "device": "NVIDIA V100",       where the times hold
//	  "sources": [                   one for each of tensors, forward_s, backward_s
//	    {"figure": "backward_s", "kind": "published", "from": "..."}
//	  ],
//	  "layers": [                    in forward order
//	    {"name": "conv1", "forward_s": 0.0018, "backward_s": 0.001,
//	     "tensors": [{"name": "conv1.weight", "bytes": 37632, "dtype": "float32"}]}
//	  ]
//	}
//
// All times are in seconds. A field that is not listed here is an error, so that a misspelt one is noticed.
type Profile struct {
	Format  string   `json:"format"`
	Name    string   `json:"name"`
	Batch   int      `json:"batch"`
	Device  string   `json:"device"`
	Sources []Source `json:"sources"`
	Layers  []Layer  `json:"layers"`
}

// Source says where one group of figures is from.
type Source struct {
	Figure string `json:"figure"`
	Kind   Kind   `json:"kind"`
	From   string `json:"from"`
}

// Layer computes for a fixed time in each direction. Its gradients are all ready when its backward pass
// ends; its forward pass needs all its tensors. A layer may have none.
type Layer struct {
	Name     string   `json:"name"`
	Forward  float64  `json:"forward_s"`
	Backward float64  `json:"backward_s"`
	Tensors  []Tensor `json:"tensors"`
}

// Tensor is one parameter and so one gradient.
type Tensor struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
	DType string `json:"dtype"`
}

// Elements is the number of values in the tensor.
func (t Tensor) Elements() int64 { return t.Bytes / dtypeBytes[t.DType] }

// Bytes is the size of the layer's gradients.
func (l Layer) Bytes() int64 {
	var sum int64
	for _, t := range l.Tensors {
		sum += t.Bytes
	}
	return sum
}

// Bytes is the size of all gradients of one step.
func (p Profile) Bytes() int64 {
	var sum int64
	for _, l := range p.Layers {
		sum += l.Bytes()
	}
	return sum
}

// TensorCount is the number of gradients of one step.
func (p Profile) TensorCount() int {
	n := 0
	for _, l := range p.Layers {
		n += len(l.Tensors)
	}
	return n
}

// ForwardSeconds is the time of one forward pass.
func (p Profile) ForwardSeconds() float64 {
	var sum float64
	for _, l := range p.Layers {
		sum += l.Forward
	}
	return sum
}

// BackwardSeconds is the time of one backward pass.
func (p Profile) BackwardSeconds() float64 {
	var sum float64
	for _, l := range p.Layers {
		sum += l.Backward
	}
	return sum
}

// ComputeSeconds is the time of a step in which nothing is communicated.
func (p Profile) ComputeSeconds() float64 { return p.ForwardSeconds() + p.BackwardSeconds() }

// Scaled returns the profile with every time multiplied by the one factor that makes a step compute for
// the given seconds. The receiver is unchanged, and the sources say what was done.
func (p Profile) Scaled(computeSeconds float64) (Profile, error) {
	if !(computeSeconds > 0) || math.IsInf(computeSeconds, 0) {
		return Profile{}, fmt.Errorf("model: cannot scale %s to %v seconds of computation: want a positive, finite number", p.Name, computeSeconds)
	}
	now := p.ComputeSeconds()
	if now == 0 {
		return Profile{}, fmt.Errorf("model: cannot scale %s: its layers compute for no time at all", p.Name)
	}
	factor := computeSeconds / now
	scaled := p
	scaled.Sources = slices.Clone(p.Sources)
	for i, s := range scaled.Sources {
		if s.Figure != "tensors" {
			scaled.Sources[i].Kind = Estimated
			scaled.Sources[i].From = fmt.Sprintf("%s; all times multiplied by %.6g", s.From, factor)
		}
	}
	scaled.Layers = slices.Clone(p.Layers)
	for i := range scaled.Layers {
		scaled.Layers[i].Forward *= factor
		scaled.Layers[i].Backward *= factor
		scaled.Layers[i].Tensors = slices.Clone(p.Layers[i].Tensors)
	}
	return scaled, nil
}

// Validate returns an error that names the first thing wrong with the profile, or nil.
func (p Profile) Validate() error {
	if p.Format != Format {
		return fmt.Errorf("model: format is %q: this version reads %q", p.Format, Format)
	}
	if p.Name == "" || p.Device == "" {
		return errors.New("model: a profile needs a name and a device")
	}
	if p.Batch < 1 {
		return fmt.Errorf("model: %s: batch is %d: want at least 1", p.Name, p.Batch)
	}
	if err := p.validateSources(); err != nil {
		return err
	}
	if len(p.Layers) == 0 {
		return fmt.Errorf("model: %s has no layers", p.Name)
	}
	layers, tensors := map[string]bool{}, map[string]bool{}
	var bytes int64
	for i, l := range p.Layers {
		if l.Name == "" || layers[l.Name] {
			return fmt.Errorf("model: %s: layer %d is named %q: want a name that no other layer has", p.Name, i, l.Name)
		}
		layers[l.Name] = true
		for _, t := range []struct {
			what    string
			seconds float64
		}{{"forward_s", l.Forward}, {"backward_s", l.Backward}} {
			if !(t.seconds >= 0) || t.seconds > maxSeconds {
				return fmt.Errorf("model: %s: layer %s: %s is %v: want 0 to %v seconds", p.Name, l.Name, t.what, t.seconds, float64(maxSeconds))
			}
		}
		for _, t := range l.Tensors {
			if t.Name == "" || tensors[t.Name] {
				return fmt.Errorf("model: %s: layer %s has a tensor named %q: want a name that no other tensor has", p.Name, l.Name, t.Name)
			}
			tensors[t.Name] = true
			size, known := dtypeBytes[t.DType]
			if !known {
				return fmt.Errorf("model: %s: tensor %s: dtype is %q: want one of %s", p.Name, t.Name, t.DType, dtypeNames())
			}
			if t.Bytes < size || t.Bytes%size != 0 || t.Bytes > maxBytes-bytes {
				return fmt.Errorf("model: %s: tensor %s: %d bytes: want a positive multiple of %d (%s), and at most %d in all", p.Name, t.Name, t.Bytes, size, t.DType, int64(maxBytes))
			}
			bytes += t.Bytes
		}
	}
	if len(tensors) == 0 {
		return fmt.Errorf("model: %s has no tensors", p.Name)
	}
	return nil
}

// Limits keep sums of sizes and times far from overflow.
const (
	maxBytes   = 1 << 50
	maxSeconds = 1e6
)

func (p Profile) validateSources() error {
	seen := map[string]bool{}
	for _, s := range p.Sources {
		if !slices.Contains(figures, s.Figure) || seen[s.Figure] {
			return fmt.Errorf("model: %s: a source is for %q: want one each for %s", p.Name, s.Figure, strings.Join(figures, ", "))
		}
		seen[s.Figure] = true
		if !slices.Contains(kinds, s.Kind) {
			return fmt.Errorf("model: %s: the source of %s is of kind %q: want measured, published or estimated", p.Name, s.Figure, s.Kind)
		}
		if s.From == "" {
			return fmt.Errorf("model: %s: the source of %s does not say where it is from", p.Name, s.Figure)
		}
	}
	for _, f := range figures {
		if !seen[f] {
			return fmt.Errorf("model: %s: no source for %s", p.Name, f)
		}
	}
	return nil
}

func dtypeNames() string {
	names := make([]string, 0, len(dtypeBytes))
	for n := range dtypeBytes {
		names = append(names, n)
	}
	sort.Strings(names)
	return strings.Join(names, ", ")
}

// Parse reads one profile from JSON and validates it.
func Parse(data []byte) (Profile, error) {
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	decoder.DisallowUnknownFields()
	var p Profile
	if err := decoder.Decode(&p); err != nil {
		return Profile{}, fmt.Errorf("model: not a profile: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return Profile{}, errors.New("model: something follows the profile")
	}
	if err := p.Validate(); err != nil {
		return Profile{}, err
	}
	return p, nil
}

// Marshal returns the profile's JSON, one line a layer. It refuses what Parse would refuse.
func Marshal(p Profile) ([]byte, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	head := p
	head.Layers = nil
	out, err := json.MarshalIndent(head, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	text := strings.TrimSuffix(string(out), "null\n}") + "[\n"
	for i, l := range p.Layers {
		if l.Tensors == nil {
			l.Tensors = []Tensor{}
		}
		line, err := json.Marshal(l)
		if err != nil {
			return nil, fmt.Errorf("model: layer %s: %w", l.Name, err)
		}
		text += "    " + string(line)
		if i < len(p.Layers)-1 {
			text += ","
		}
		text += "\n"
	}
	return []byte(text + "  ]\n}\n"), nil
}

// Load reads and validates the profile in a file.
func Load(path string) (Profile, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Profile{}, fmt.Errorf("model: %w", err)
	}
	p, err := Parse(data)
	if err != nil {
		return Profile{}, fmt.Errorf("%w (in %s)", err, path)
	}
	return p, nil
}

// Save writes the profile to a file that is either whole or, after an error, as it was before.
func Save(path string, p Profile) error {
	data, err := Marshal(p)
	if err != nil {
		return err
	}
	temporary, err := os.CreateTemp(filepath.Dir(path), ".profile-*")
	if err != nil {
		return fmt.Errorf("model: %w", err)
	}
	defer os.Remove(temporary.Name())
	_, err = temporary.Write(data)
	if err = errors.Join(err, temporary.Chmod(0o644), temporary.Close()); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if err := os.Rename(temporary.Name(), path); err != nil {
		return fmt.Errorf("model: %w", err)
	}
	return nil
}
