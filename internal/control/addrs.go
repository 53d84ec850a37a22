package control

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// bindAddr returns the address that rank 0 listens on.
func (o Options) bindAddr() (string, error) {
	port := strconv.Itoa(o.Port)
	if o.Interface == "" {
		return net.JoinHostPort("", port), nil
	}
	up, err := interfaces()
	if err != nil {
		return "", err
	}
	var names []string
	for _, i := range up {
		if i.name == o.Interface {
			return net.JoinHostPort(i.hosts[0], port), nil
		}
		names = append(names, i.name)
	}
	return "", fmt.Errorf("control: no interface %q that is up and has an address; there are %s", o.Interface, strings.Join(names, ", "))
}

// published returns the addresses under which the others may reach a listener.
func published(bound net.Addr) ([]string, error) {
	tcp, ok := bound.(*net.TCPAddr)
	if !ok || !tcp.IP.IsUnspecified() {
		return []string{bound.String()}, nil
	}
	up, err := interfaces()
	if err != nil {
		return nil, err
	}
	var addrs []string
	for _, i := range up {
		for _, host := range i.hosts {
			addrs = append(addrs, net.JoinHostPort(host, strconv.Itoa(tcp.Port)))
		}
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("control: no interface is up and has an address, so no other rank could reach this one")
	}
	return addrs, nil
}

type networkInterface struct {
	name  string
	hosts []string // IPv4 first
}

// interfaces returns those that are up and have an address that means the same
// on other machines, loopback last.
func interfaces() ([]networkInterface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("control: can't list the network interfaces: %w", err)
	}
	var outer, loopback []networkInterface
	for _, i := range all {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			continue // it went away meanwhile
		}
		var v4, v6 []string
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			switch {
			case !ok || n.IP.IsLinkLocalUnicast():
			case n.IP.To4() != nil:
				v4 = append(v4, n.IP.String())
			default:
				v6 = append(v6, n.IP.String())
			}
		}
		hosts := append(v4, v6...)
		if len(hosts) == 0 {
			continue
		}
		found := networkInterface{name: i.Name, hosts: hosts}
		if i.Flags&net.FlagLoopback != 0 {
			loopback = append(loopback, found)
		} else {
			outer = append(outer, found)
		}
	}
	return append(outer, loopback...), nil
}
